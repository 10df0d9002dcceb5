"""A rank's thread that follows orders beside the steps, at low priority."""

from __future__ import annotations

import logging
import socket
import sys
import threading
from contextlib import ExitStack
from typing import Final

import torch

from host.process import give_way
from serve.errors import StartError
from serve.worker import wire
from serve.worker.exchange import Exchange
from serve.worker.profiler import Profiler

_NICENESS: Final = 10
_SWITCH_SECONDS: Final = 0.0005
"""How long this thread may keep the one that computes waiting for the interpreter."""

_log = logging.getLogger(__name__)


class OrderLoop:
    """Answers every order, one after the other: those about weights by an exchange, those about profiles by a profiler."""

    def __init__(self, exchange: Exchange, profiler: Profiler, device: torch.device) -> None:
        self.exchange = exchange
        self.profiler = profiler
        self._device = device

    def start(self, orders: socket.socket) -> None:
        """Follow orders from now on."""
        sys.setswitchinterval(_SWITCH_SECONDS)
        threading.Thread(target=self._follow, args=(orders,), daemon=True, name="orders").start()

    def _follow(self, orders: socket.socket) -> None:
        give_way(_NICENESS)
        torch.set_grad_enabled(False)
        with ExitStack() as beside:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
                # What is copied to the device waits for no step there: other weights come in thousands of pieces.
                stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
                beside.enter_context(torch.cuda.stream(stream))
            try:
                while True:
                    wire.send(orders, wire.encode(self._answer(wire.decode_order(wire.receive(orders)))))
            except wire.ConnectionLost:
                pass  # the server is gone, and the thread that computes ends the process

    def _answer(self, order: wire.Order) -> wire.Report:
        if not isinstance(order, wire.ProfilingOrder):
            return self.exchange.answer(order)
        try:
            return self._profiling(order)
        except StartError as error:
            return wire.Failed(str(error), configured=False)
        except Exception as error:
            _log.exception("what was to be recorded cannot be")
            return wire.Failed(f"{type(error).__name__}: {error}", configured=False)

    def _profiling(self, order: wire.ProfilingOrder) -> wire.Report:
        match order:
            case wire.Profile(steps=steps, at_most_seconds=seconds):
                self.profiler.begin(steps, seconds)
            case wire.TellProfiled():
                return wire.Told(self.profiler.told())
            case wire.SendPart(offset=offset):
                return wire.Part(self.profiler.part(offset))
            case wire.ForgetProfiled():
                self.profiler.forget()
        return wire.Fine()
