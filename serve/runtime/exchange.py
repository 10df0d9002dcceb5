"""One exchange of the weights that ranks compute with, from their preparation to what is given back."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from serve.config import ServerConfig
from serve.engine.executor import ExecutorDied, Prepared, Unlike
from serve.engine.swap import Swap, Swapped, Weights
from serve.errors import EngineDown
from serve.runtime.commands import SwapWeights
from serve.runtime.engine_thread import EngineThread

LOOK_SECONDS = 0.05
"""How often it is looked whether the ranks still live."""

_log = logging.getLogger(__name__)


class Prepares(Protocol):
    """Ranks that make other weights ready while they compute."""

    def prepare(self, config: ServerConfig, number: int) -> Prepared | Unlike: ...

    def forget_prepared(self) -> None: ...


class Exchange:
    """Has one group of ranks take other weights. Blocks; not on the engine's thread, which goes on with its steps."""

    def __init__(self, group: Prepares, bridge: EngineThread, *, is_alive: Callable[[], bool]) -> None:
        self._group = group
        self._bridge = bridge
        self._is_alive = is_alive

    def run(self, config: ServerConfig, number: int, patience_seconds: float) -> Swapped | Unlike:
        """Prepare the checkpoint of ``config``, and have the engine take it when it may.

        Raises:
            StartError: the checkpoint cannot be served, or a rank could not read it.
            Unavailable: the ranks were lost meanwhile, or the server stops.
        """
        if not self._is_alive():
            raise _lost()
        try:
            prepared = self._group.prepare(config, number)
        except ExecutorDied as death:
            raise _lost() from death
        if isinstance(prepared, Unlike):
            return prepared
        how = "beside those that serve" if prepared.beside else "to be read into place while no step is computed"
        _log.info("other weights are ready, %s: %s", how, config.model.path)
        done: Future[Swapped] = Future()
        swap = Swap(Weights(number, prepared.checkpoint_step), patience_seconds)
        self._bridge.send(SwapWeights(swap, self._is_alive, done))
        swapped = self._wait(done)
        try:
            self._group.forget_prepared()
        except ExecutorDied as death:
            _log.debug("what was exchanged need not be given back: %s", death)
        return swapped

    def _wait(self, done: Future[Swapped]) -> Swapped:
        while True:
            try:
                return done.result(LOOK_SECONDS)
            except TimeoutError:
                if not self._is_alive() and done.cancel():
                    raise _lost() from None


def _lost() -> EngineDown:
    return EngineDown("the ranks were lost before they took other weights")
