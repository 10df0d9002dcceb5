"""One rank's recording of its next steps by torch's profiler.

It is begun and fetched by the thread that follows orders, and made by the one that computes.
"""

from __future__ import annotations

import gzip
import io
import logging
import select
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Final

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from serve.engine.executor import Profiled
from serve.engine.plan import StepPlan, StepResult
from serve.errors import RankStartError
from serve.model.labels import Labels
from serve.worker.loader import RankModel
from serve.worker.recorded_steps import RecordedSteps

MAX_TRACE_BYTES: Final = 64 << 20
"""What one rank's trace may have, compressed."""
_MAX_FILE_BYTES: Final = 1 << 30
"""What a trace may have before it is compressed, as torch writes it."""
_PIECE_BYTES: Final = 1 << 20
_LOOK_SECONDS: Final = 0.25
"""How often a rank without a step looks whether its recording is to end."""

_log = logging.getLogger(__name__)

Execute = Callable[[StepPlan], StepResult | None]


class _State(Enum):
    WAITING = 1
    """For the first step."""
    RECORDING = 2
    """The profiler runs, on the thread that computes."""
    STOPPED = 3
    OVER = 4
    """The trace is there, or never will be."""


@dataclass(slots=True)
class _Take:
    """One recording."""

    profiler: profile
    steps_left: int
    deadline_seconds: float
    state: _State = _State.WAITING
    given_up: bool = False
    num_steps: int = 0
    failure: str = ""
    trace: bytes = b""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held for a change of the state: two threads look at it."""


class Profiler:
    """Records steps when it is told to. While it is not, all that a step has of it is two looks at ``is_on``.

    A trace has names and times of operations and of the model's modules, and each step's number and size: no shapes, no values,
    and so nothing of a prompt.
    """

    def __init__(self, model: RankModel, replayed: RecordedSteps | None = None) -> None:
        """
        Args:
            replayed: the steps that are replayed on a CPU, where some are: in a trace each stands with its operations.
        """
        self.is_on = False
        """Whether steps are to be computed by ``record``, and ``attend`` called before each is waited for."""
        self._model = model
        self._replayed = replayed
        self._labels = Labels(model.body, model.head)
        self._take: _Take | None = None

    # The thread that follows orders.

    def begin(self, steps: int, at_most_seconds: float) -> None:
        """Record the next steps.

        Raises:
            RankStartError: a recording goes on that was given up and has not ended yet.
        """
        if self._take is not None and self._take.state is _State.RECORDING:
            raise RankStartError("a recording before has not ended yet")
        activities = [ProfilerActivity.CPU]
        if self._model.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        try:
            options = torch._C._profiler._ExperimentalConfig(trace_only=True)  # its events are read by nobody but the trace
        except TypeError:  # torch before 2.13 makes them, too
            options = torch._C._profiler._ExperimentalConfig()
        profiler = profile(activities=activities, experimental_config=options)
        profiler.prepare_trace()  # here, where no step waits for it: the first time takes a second
        self._take = _Take(profiler, steps, time.monotonic() + at_most_seconds)
        self.is_on = True

    def told(self) -> Profiled:
        """How far the recording is. The trace is written by whoever asks first once it has ended."""
        take = self._take
        if take is None:
            return Profiled(0, is_over=True)
        with take.lock:
            if take.state is _State.WAITING and time.monotonic() >= take.deadline_seconds:
                take.state, self.is_on = _State.OVER, False
        if take.state is _State.STOPPED:
            _write(take)
            take.state = _State.OVER
        return Profiled(take.num_steps, take.state is _State.OVER, len(take.trace), take.failure)

    def part(self, offset: int) -> bytes:
        """What the trace has from there on, as much as is sent at once; nothing behind its end."""
        return b"" if self._take is None else self._take.trace[offset : offset + _PIECE_BYTES]

    def forget(self) -> None:
        """Give the trace back; a recording that goes on ends with the step under way."""
        take = self._take
        if take is None:
            return
        with take.lock:
            take.given_up = True
            if take.state is not _State.RECORDING:
                self._take, self.is_on = None, False

    # The thread that computes.

    def attend(self, steps: socket.socket) -> None:
        """Wait for the next plan to come, or for the end of a recording that gets no further step in its time."""
        take = self._take
        if take is None or take.state is not _State.RECORDING:
            return
        while not take.given_up and (left := take.deadline_seconds - time.monotonic()) > 0.0:
            if select.select([steps], [], [], min(left, _LOOK_SECONDS))[0]:
                return
        self._stop(take)

    def record(self, plan: StepPlan, execute: Execute) -> StepResult | None:
        """Compute one step, as ``execute`` does. A plan without spans computes nothing, and is not recorded."""
        take = self._take
        if take is None or not plan.spans or not self._starts(take):
            return execute(plan)
        with record_function(f"step {plan.step}: {plan.num_tokens} positions of {len(plan.spans)} sequences"):
            result = execute(plan)
        take.num_steps += 1
        take.steps_left -= 1
        if take.given_up or take.steps_left <= 0 or time.monotonic() >= take.deadline_seconds:
            self._stop(take)
        return result

    def _starts(self, take: _Take) -> bool:
        """Whether a step is recorded, where need be as the first."""
        with take.lock:
            if take.state is _State.WAITING and not take.given_up and time.monotonic() < take.deadline_seconds:
                take.state = _State.RECORDING
            elif take.state is not _State.RECORDING:
                return False
        if take.num_steps == 0:
            try:
                self._labels.put()
                self._replay(False)
                take.profiler.start_trace()
            except Exception as error:
                self._fail(take, error)
                return False
        return True

    def _stop(self, take: _Take) -> None:
        try:
            take.profiler.stop_trace()
        except Exception as error:
            self._fail(take, error)
            return
        self._end(take, _State.STOPPED)

    def _fail(self, take: _Take, error: Exception) -> None:
        _log.warning("steps could not be recorded", exc_info=error)
        take.failure = f"torch's profiler failed ({type(error).__name__})"
        self._end(take, _State.OVER)

    def _end(self, take: _Take, state: _State) -> None:
        self._labels.take_off()
        self._replay(True)
        with take.lock:
            self.is_on, take.state = False, state  # in this order: once the state is seen, another recording may begin
            if take.given_up:
                self._take = None

    def _replay(self, replays: bool) -> None:
        if self._replayed is not None:
            self._replayed.aside = not replays


def _write(take: _Take) -> None:
    """Have torch write the trace, and take it in compressed."""
    try:
        with tempfile.TemporaryDirectory(prefix="tessera-trace-") as folder:
            file = Path(folder, "trace.json")
            take.profiler.export_chrome_trace(str(file))
            num_bytes = file.stat().st_size
            if num_bytes > _MAX_FILE_BYTES:
                raise _TooLarge(num_bytes)
            packed = io.BytesIO()
            with file.open("rb") as plain, gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=4, mtime=0) as pack:
                shutil.copyfileobj(plain, pack, _PIECE_BYTES)
        if packed.tell() > MAX_TRACE_BYTES:
            raise _TooLarge(num_bytes)
        take.trace = packed.getvalue()
    except _TooLarge as error:
        take.failure = f"the trace has {error.args[0]} bytes, more than are sent: ask for fewer steps"
    except Exception as error:
        _log.warning("the trace could not be written", exc_info=error)
        take.failure = f"the trace could not be written ({type(error).__name__})"
    finally:
        del take.profiler  # and all that it recorded


class _TooLarge(Exception):
    """More than is sent."""
