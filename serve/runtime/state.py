"""What the server serves, and what it does with a new request because of that."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from enum import Enum

from serve.engine.executor import ModelFacts
from serve.errors import Draining, EngineDown, Loading, StartError, Unavailable
from serve.runtime.edition import Edition

_log = logging.getLogger(__name__)


class State(Enum):
    """What the server does with a new generation request."""

    LOADING = "loading"
    """The model is not loaded yet, or is about to be loaded again: refused with ``Loading``; those in flight go on."""
    SERVING = "serving"
    DRAINING = "draining"
    """Refused with ``Draining``; those in flight go on. Never left but for STOPPED."""
    DOWN = "down"
    """A rank died and the supervisor brings the engine back: refused with ``EngineDown``, or queued, with ``requeue``."""
    STOPPED = "stopped"
    """Refused with ``Draining``; nothing is left."""


class ServerState:
    """Owns the server's state and the edition that goes with it, and tells who listens of every change.

    Belongs to the event loop: made, called and read on its thread.
    """

    def __init__(self, edition: Edition) -> None:
        self._requeue = edition.config.supervisor.requeue
        self.edition = edition
        """What is served; before the model is loaded, what will be."""
        self.facts: ModelFacts | None = None
        """What the ranks said when they were last ready."""
        self._now = State.LOADING
        self._takes_no_new = False
        self._listeners: list[Callable[[State], None]] = []
        self._serving = asyncio.Event()
        self._end: asyncio.Future[StartError] = asyncio.get_running_loop().create_future()

    @property
    def now(self) -> State:
        return self._now

    @property
    def has_given_up(self) -> bool:
        """Whether there will never be an engine again."""
        return self._end.done()

    @property
    def has_engine(self) -> bool:
        """Whether an engine may be there to be told something."""
        return self._now in (State.LOADING, State.SERVING, State.DRAINING)

    @property
    def waits_for_engine(self) -> bool:
        """Whether the ranks died and requests wait for the next ones."""
        return self._now is State.DOWN and self._requeue and not self.has_given_up

    def on_change(self, callback: Callable[[State], None]) -> None:
        """Call ``callback`` with every state entered from now on."""
        self._listeners.append(callback)

    def unavailable(self, edition: Edition | None = None) -> Unavailable | None:
        """Why there are no new requests now, or none that were made for ``edition``; ``None`` while there are."""
        match self._now:
            case State.SERVING:
                if self._is_meant(edition):
                    return None
                return Loading("the model was loaded again while this call was read; send it again")
            case State.LOADING:
                return Loading("the model is being loaded")
            case State.DOWN:
                return EngineDown("the engine is being restarted, try again in a moment")
            case State.DRAINING | State.STOPPED:
                return Draining("the server is going away and takes no more requests")

    def refusal(self, edition: Edition | None = None) -> Unavailable | None:
        """Why a request made for ``edition`` is refused now; ``None`` if it may begin, or wait for an engine to come back."""
        may_wait = self.waits_for_engine and not self._takes_no_new and self._is_meant(edition)
        return None if may_wait else self.unavailable(edition)

    def _is_meant(self, edition: Edition | None) -> bool:
        return edition is None or edition.lineage is self.edition.lineage

    def require_engine(self) -> None:
        """Raise unless there is an engine to ask; a server that drains has one still.

        Raises:
            Loading, EngineDown, Draining: there is none.
        """
        unavailable = self.unavailable()
        if unavailable is not None and self._now is not State.DRAINING:
            raise unavailable

    @contextlib.contextmanager
    def taking_no_new(self) -> Iterator[None]:
        """Within, new requests are refused as while the model is loaded, and those in flight go on.

        So it is where the ranks die and come back meanwhile: else a server under load would never be without calls.
        """
        self._takes_no_new = True
        try:
            self.enter(State.LOADING)
            yield
        finally:
            self._takes_no_new = False

    def enter(self, state: State) -> None:
        """Change the state and tell everybody. A server that drains does not come back, whatever its engine does."""
        if state is State.SERVING and self._takes_no_new:
            state = State.LOADING
        if state is self._now or self._now is State.STOPPED:
            return
        if self._now is State.DRAINING and state is not State.STOPPED:
            return
        _log.info("state: %s -> %s", self._now.value, state.value)
        self._now = state
        for listener in tuple(self._listeners):
            listener(state)

    def serve(self, edition: Edition, facts: ModelFacts) -> None:
        """The ranks are ready with this edition."""
        self.edition, self.facts = edition, facts
        self.enter(State.SERVING)
        if self._now is State.SERVING:
            self._serving.set()

    def take_weights(self, edition: Edition, facts: ModelFacts) -> None:
        """The ranks compute with the weights of this edition by now, which is the same model in all else."""
        self.edition, self.facts = edition, facts

    def give_up(self, error: StartError) -> None:
        """There will be no engine again; the first reason stands."""
        if not self._end.done():
            self._end.set_result(error)

    async def until_serving(self) -> None:
        """Wait until the model is loaded.

        Raises:
            StartError: it cannot be.
        """
        serving = asyncio.ensure_future(self._serving.wait())
        try:
            await asyncio.wait((serving, self._end), return_when=asyncio.FIRST_COMPLETED)
        finally:
            serving.cancel()
        if self._end.done():
            raise self._end.result()

    async def until_given_up(self) -> StartError:
        """Wait for the error after which the server cannot go on."""
        return await asyncio.shield(self._end)
