"""The exchange of what is served for what the model's folder holds by now."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from serve.engine.executor import Unlike
from serve.errors import Draining, EngineDown, Loading, ReloadRefused, StartError
from serve.metrics import Metrics
from serve.runtime.edition import Edition
from serve.runtime.flight import Flight
from serve.runtime.state import ServerState, State
from serve.runtime.supervisor import Supervisor

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Exchange:
    """Two editions that the supervisor has in hand."""

    edition: Edition
    """The new one."""
    settled: asyncio.Future[None]
    """Done when there is an engine again, or never will be."""
    error: StartError | None = None
    """Why it is not the new edition's."""


class Reload:
    """Exchanges editions, one exchange at a time. Belongs to the event loop.

    First the folder is read and the calls in flight end, while the engine still lives; then the supervisor has it in hand.
    """

    def __init__(
        self,
        server: ServerState,
        flight: Flight,
        supervisor: Supervisor,
        metrics: Metrics,
        *,
        reopen: Callable[[], Awaitable[Edition]],
        drain_seconds: float,
    ) -> None:
        self._server = server
        self._flight = flight
        self._supervisor = supervisor
        self._metrics = metrics
        self._reopen = reopen
        self._drain_seconds = drain_seconds
        self._task: asyncio.Task[None] | None = None
        self._exchange: _Exchange | None = None

    @property
    def is_in_hand(self) -> bool:
        """Whether the supervisor exchanges one engine for another at this moment."""
        return self._exchange is not None

    @property
    def goes_on(self) -> bool:
        """Whether there is an exchange at this moment, in whoever's hand."""
        return self._task is not None

    async def run(self) -> None:
        """Read the model's folder again and serve what is in it now: its newest checkpoint, for a folder of several.

        Weights of the same model in all else are taken between two steps, and no call ends for it but those that must end on
        the weights they began with and take longer than ``rpc.drain_seconds``. For another model, ranks start again: calls
        in flight have as long to end; the rest ends with ``Loading``. A folder that cannot be served is
        found out before anything is given up; where the ranks fail all the same, the model before is loaded again.

        Raises:
            Loading, EngineDown, Draining: there is no model to replace, or the server is going away.
            ReloadRefused: a reload goes on already, or the folder cannot be served; the edition before it is.
        """
        if self._task is not None:
            raise ReloadRefused("the model is being loaded again already; ask when that has ended")
        unavailable = self._server.unavailable()
        if unavailable is not None:
            raise unavailable
        task = self._task = asyncio.create_task(self._replace())
        task.add_done_callback(self._ended)
        await asyncio.wait((task,))  # the reload goes on when its caller has gone
        if task.cancelled():
            raise Draining("the server is going away")
        task.result()

    def cancel(self) -> None:
        """End it where it is, if one goes on."""
        if self._task is not None:
            self._task.cancel()

    def is_outdated(self, edition: Edition) -> bool:
        """Whether news of an engine with this edition are from before the exchange that goes on."""
        return self._exchange is not None and self._exchange.edition is not edition and self._exchange.error is None

    def taken_back(self, error: StartError) -> None:
        """The new edition cannot be loaded, and the one before it is being loaded again."""
        if self._exchange is not None:  # else the server is stopping
            self._exchange.error = error

    def gave_up(self, error: StartError) -> None:
        """There will be no engine again, of neither edition."""
        if self._exchange is not None:
            self._exchange.error = self._exchange.error or error
            self.settle()

    def settle(self) -> None:
        """There is an engine again, or never will be."""
        if self._exchange is not None and not self._exchange.settled.done():
            self._exchange.settled.set_result(None)

    async def _replace(self) -> None:
        """One reload."""
        try:
            edition = await self._read_folder()
            if await self._swap(edition):
                self._metrics.reloaded("weights")
                return
        except ReloadRefused:
            self._metrics.reload_refused()
            self._metrics.reloaded("refused")
            raise
        try:
            await self._end_calls()
            failure = await self._hand_over(edition)
        except BaseException:
            edition.release()
            raise
        self._metrics.reloaded("ranks" if failure is None else "taken_back")
        if failure is not None:
            self._metrics.reload_refused()
            edition.release()
        if failure is not None and self._server.has_given_up:
            raise EngineDown(f"{failure}, and what was served before cannot be brought back") from failure
        if failure is not None:
            raise ReloadRefused(f"{failure}; what was served before is served again") from failure

    async def _swap(self, edition: Edition) -> bool:
        """Exchange the weights alone, if that is all there is to it; False if it is not, and nothing has changed."""
        served = self._server.edition
        if self._server.unavailable() is not None or edition.tokenizer_digest != served.tokenizer_digest:
            return False
        heir = edition.after(served)
        try:
            swapped = await asyncio.to_thread(self._supervisor.swap, heir, self._drain_seconds)
        except StartError as error:
            edition.release()
            raise ReloadRefused(f"{error}; what was served before goes on") from error
        except Exception:  # what the ranks' loss raises, and a defect: either way the folder may go
            edition.release()
            raise
        if isinstance(swapped, Unlike):
            _log.info("ranks are started again for %s: %s", edition.config.model.path, swapped.reason)
            return False
        if swapped.refused:
            edition.release()
            raise ReloadRefused(f"{swapped.refused}; what was served before goes on")
        _log.info(
            "weights exchanged in %.3f s, %d sequences computed again: %s",
            swapped.seconds, swapped.num_recomputed, edition.config.model.path,
        )  # fmt: skip
        return True

    async def _read_folder(self) -> Edition:
        try:
            return await self._reopen()
        except StartError as error:
            raise ReloadRefused(f"{error}; what was served before goes on") from error

    async def _end_calls(self) -> None:
        """Take no new requests and wait for those in flight.

        Raises:
            Loading, EngineDown, Draining: there is nothing to replace by now.
        """
        unavailable = self._server.unavailable()
        if unavailable is not None:
            raise unavailable
        late = Loading("the model is being loaded again and this call did not end in time")
        with self._server.taking_no_new():
            await self._flight.until_over(at_most_seconds=self._drain_seconds, error=late)
        if self._server.has_given_up or self._server.now in (State.DRAINING, State.STOPPED):
            raise self._server.unavailable() or Draining("the server is going away")

    async def _hand_over(self, edition: Edition) -> StartError | None:
        """Have the supervisor load ``edition``, and wait for an engine. Returns why it is another edition's, if it is."""
        exchange = self._exchange = _Exchange(edition, asyncio.get_running_loop().create_future())
        try:
            await asyncio.to_thread(self._supervisor.reload, edition)  # it may have to wait for ranks to die
            await exchange.settled
            return exchange.error
        finally:
            self._exchange = None

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._task = None
        # Also where whoever asked for it has gone.
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.warning("the model was not loaded again: %s", error)
