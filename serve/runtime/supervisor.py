"""The life of the ranks: start, serve, notice death, keep or end what was in flight, start again."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable

from serve.engine.engine import Engine
from serve.engine.executor import Executor, ExecutorDied, Loss, ModelFacts, Unlike, loss_reason
from serve.engine.swap import Swapped
from serve.errors import Draining, Loading, RankStartError, StartError, Unavailable
from serve.metrics import Metrics
from serve.runtime.commands import Wake
from serve.runtime.edition import Edition
from serve.runtime.engine_thread import EngineThread
from serve.runtime.exchange import Exchange
from serve.runtime.life import Life, engine_down, engine_lost
from serve.runtime.rank_figures import RankFigures
from serve.runtime.seams import LifeListener, Profiling, RankGroup
from serve.runtime.step_watch import StepWatch

POLL_SECONDS = 0.05
PAUSE_SECONDS = 1.0
"""A look at the ranks that comes so much too late means that this process stood still: it was stopped, or its machine was."""
WAKE_SECONDS = 1.0
"""After that: for the heartbeats and answers that lie in the sockets to be read, and for ranks that stood still too."""
FIRST_BACKOFF_SECONDS = 0.5
LONGEST_BACKOFF_SECONDS = 30.0
LEAVE_SECONDS = 2.0
"""How long a step in progress may go on once the server stops."""
STOP_SECONDS = 20.0
"""How long the server waits for its threads once it has killed the ranks; one that hangs ends with the process."""
STACKS_SECONDS = 0.3
"""For ranks that hang to print where."""
START_GRACE_SECONDS = 10.0
"""The ranks' own start deadline comes first: it knows more about what went wrong."""

_log = logging.getLogger(__name__)


class Supervisor:
    """Owns the two threads around the engine: one that lives its lives, one that watches them.

    The first thread spawns the ranks, builds an engine on them and runs it; when they die the engine waits with
    its requests for the next ones, or its requests end with ``EngineDown``, by the options; and it begins again,
    later each time. The second looks every 50 ms whether a rank is dead, silent, or stuck in a step, also while
    nobody asks for anything.
    """

    def __init__(
        self,
        edition: Edition,
        *,
        make_group: Callable[[Edition], RankGroup],
        make_engine: Callable[[Edition, ModelFacts, Executor], Engine],
        bridge: EngineThread,
        listener: LifeListener,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._config = edition.config.supervisor
        self._make_group = make_group
        self._make_engine = make_engine
        self._bridge = bridge
        self._listener = listener
        self._metrics = metrics
        self._figures = RankFigures(metrics, clock)
        self._clock = clock
        self._stop = threading.Event()
        self._lock = threading.Lock()  # guards what follows, and cause and replaced of every Life
        self._life: Life | None = None
        self._edition = edition
        self._num_swaps = 0
        self._kept: tuple[Engine, Edition] | None = None
        """The engine that waits for new ranks, and what its last ones served. The first thread's alone."""
        self._previous: Edition | None = None
        """What to go back to, from a reload until the new edition serves."""
        self._worker = threading.Thread(target=self._live, name="tessera-engine", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name="tessera-watch", daemon=True)

    @property
    def is_alive(self) -> bool:
        """Whether no thread of it has ended or hangs by itself. Any thread."""
        life = self._life
        ends = life is None or not life.never_ends(self._clock())
        return ends and all(thread.ident is None or thread.is_alive() for thread in (self._worker, self._watcher))

    def start(self) -> None:
        """Begin the first life; returns at once."""
        self._worker.start()
        self._watcher.start()

    def stop(self) -> None:
        """End for good: requests still alive end with ``Draining``, the ranks are killed. Blocks for a few seconds at most."""
        self._stop.set()
        self._bridge.send(Wake())
        with self._lock:
            life = self._life
        if life is not None and life.serving:
            self._join(self._worker, LEAVE_SECONDS)
        deadline = self._clock() + STOP_SECONDS
        while self._worker.is_alive() and self._clock() < deadline:
            if life is not None:
                self._close(life)
            self._join(self._worker, POLL_SECONDS)
        self._join(self._watcher, STOP_SECONDS)
        if self._worker.is_alive():
            _log.error("the engine's thread hangs; it ends with the process")

    def reload(self, edition: Edition) -> None:
        """End this life and begin the next one with another edition; returns at once. Any thread.

        The listener hears ``engine_up`` with it, or ``taken_back`` and then ``engine_up`` with the one before. What is still
        in flight ends with ``Loading``.
        """
        with self._lock:
            self._previous, self._edition = self._edition, edition
            life = self._life
            if life is not None:
                life.replaced = True
        if life is not None and not life.serving:
            self._close(life)
        self._bridge.send(Wake())

    def swap(self, edition: Edition, patience_seconds: float) -> Swapped | Unlike:
        """Have the ranks that serve take the weights of another edition, between two steps. Blocks; not the engine's thread.

        The listener hears ``weights_taken`` where they do; a restart loads the new edition from then on.

        Args:
            edition: must have the tokenizer and the options of the one that is served.
            patience_seconds: how long requests that must end on the weights they began with hold it up.

        Raises:
            StartError: the checkpoint cannot be served, or a rank could not read it.
            Unavailable: the ranks were lost meanwhile, or the server stops.
        """
        with self._lock:
            life = self._life
            self._num_swaps += 1
            number = self._num_swaps
        if life is None or life.facts is None:
            raise engine_down()
        exchange = Exchange(life.group, self._bridge, is_alive=lambda: self._lives(life))
        swapped = exchange.run(edition.config, number, self._clock() + patience_seconds)
        if isinstance(swapped, Swapped) and not swapped.refused:
            step = swapped.swap.weights.checkpoint_step
            self._take_over(life, edition, dataclasses.replace(life.facts, checkpoint_step=step))
        return swapped

    def profiling(self) -> Profiling:
        """What the ranks that serve record of their steps. Any thread.

        Raises:
            EngineDown: there are none.
            ExecutorDied: they are being ended.
        """
        with self._lock:
            life = self._life
        if life is None or not self._lives(life):
            raise engine_down()
        return life.group.profiling()

    def _lives(self, life: Life) -> bool:
        return life is self._life and life.serving and life.cause is None and not life.replaced and not self._stop.is_set()

    def _take_over(self, life: Life, edition: Edition, facts: ModelFacts) -> None:
        with self._lock:
            life.edition, life.facts = edition, facts
            if life is self._life:
                self._edition = edition
        self._metrics.model_served(facts, model=edition.config.model.served_name)
        self._listener.weights_taken(edition, facts)

    # The thread that lives the lives.

    def _live(self) -> None:
        failures = 0
        served = False
        farewell: Unavailable = Draining("the server is stopping")
        while (life := self._begin()) is not None:
            error, did_work = self._live_once(life)
            served = served or life.serving
            if self._stop.is_set():
                break
            if life.replaced or self._take_back(life, error):
                failures = 0
                continue
            self._metrics.engine_failed(loss_reason(life.cause))
            if not served:
                self._listener.gave_up(error)
                farewell = engine_lost()
                break
            failures = 1 if did_work else failures + 1
            if failures > self._config.max_restarts_in_a_row:
                limit = f"{failures - 1} restarts without a completed step, the limit of supervisor.max_restarts_in_a_row"
                self._listener.gave_up(RankStartError(f"the engine failed after {limit}; at last: {error}"))
                farewell = engine_lost()
                break
            _log.warning("restarting the engine in %.1f s (%s)", _backoff_seconds(failures), error)
            self._metrics.engine_restarted()
            self._stop.wait(_backoff_seconds(failures))
        self._give_up(None, farewell)

    def _begin(self) -> Life | None:
        """Make the next group, unless the server stops."""
        with self._lock:
            if self._stop.is_set():
                return None
            group = self._make_group(self._edition)
            self._life = Life(self._edition, group, self._clock(), StepWatch(group, self._config, self._clock))
            return self._life

    def _take_back(self, life: Life, error: StartError) -> bool:
        """Whether this life was a reload's and never served; the edition before it is then due again."""
        with self._lock:
            if life.serving or self._previous is None or life.edition is not self._edition:
                return False
            self._edition, self._previous = self._previous, None
        _log.error("the reload failed, going back to the model before it: %s", error)
        self._listener.taken_back(error)
        return True

    def _live_once(self, life: Life) -> tuple[StartError, bool]:
        """Start the ranks, serve, and clear up. Returns why it ended and whether a step succeeded."""
        engine: Engine | None = None
        steps_before = 0
        error: StartError = RankStartError("the engine stopped")
        _log.info("loading the model: %s", life.edition.config.model.served_name)
        try:
            is_same_folder = life.edition.check_folder()
            facts = life.group.start()
            engine = self._engine_on(life, facts, is_same_folder=is_same_folder)
            steps_before = engine.stats().steps
            self._bridge.take(engine)
            self._announce(life, engine, facts)
            self._bridge.run(engine, should_leave=lambda: self._stop.is_set() or life.cause is not None or life.replaced)
        except StartError as start_error:
            error = start_error
        except ExecutorDied as death:
            self._condemn(life, death.sentence or "the ranks died")
        except Exception as defect:
            if not self._stop.is_set() and life.cause is None and not life.replaced:
                _log.exception("the engine broke")
            life.broke = engine is not None  # before there is one, nothing of what waits for these ranks was touched
            self._condemn(life, f"{type(defect).__name__} in the engine")
        if life.cause is not None:
            error = RankStartError(life.cause)
        did_work = engine is not None and engine.stats().steps > steps_before
        self._end(life, engine)
        life.condemned_seconds = None
        return error, did_work

    def _engine_on(self, life: Life, facts: ModelFacts, *, is_same_folder: bool) -> Engine:
        """The engine that waited for these ranks, or a new one."""
        if self._kept is None:
            return self._make_engine(life.edition, facts, life.steps)
        (engine, served), self._kept = self._kept, None
        engine.revive(facts, life.steps, same_weights=is_same_folder and served is life.edition)
        return engine

    def _announce(self, life: Life, engine: Engine, facts: ModelFacts) -> None:
        with self._lock:
            if life.replaced:
                return
            life.serving, life.facts = True, facts
            self._previous = None
        self._metrics.engine_started(engine.stats(), facts, model=life.edition.config.model.served_name)
        self._figures.tell(life.group)
        _log.info(
            "engine up: family=%s dtype=%s device=%s attention=%s linear=%s kernels=%s kv_blocks=%d (%s) loaded in %.1f s",
            facts.family, facts.dtype, facts.device, facts.attention, facts.linear, facts.kernels, facts.num_blocks,
            facts.cache_memory, self._clock() - life.started_seconds,
        )  # fmt: skip
        self._listener.engine_up(life.edition, facts)

    def _end(self, life: Life, engine: Engine | None) -> None:
        """Tell the clients first, then kill what is left of the ranks: the killing may take a moment."""
        self._metrics.engine_stopped()
        if not self._keep(life, engine):
            self._give_up(engine, self._farewell(life))
        self._close(life)

    def _keep(self, life: Life, engine: Engine | None) -> bool:
        """Whether what the engine holds waits for the next ranks; an earlier one that waits already goes on waiting."""
        if not self._config.requeue or self._stop.is_set() or life.replaced or life.broke:
            return False
        if engine is None:
            return self._kept is not None
        if life.cause is None or not self._bridge.outlive(engine, engine_down(), resume=self._config.resume_streams):
            return False
        self._kept = engine, life.edition
        num_kept = len(engine.request_ids)
        if num_kept:
            _log.warning("%d requests wait for the ranks to be back", num_kept)
        self._metrics.engine_waits(engine.stats())
        return True

    def _give_up(self, engine: Engine | None, error: Unavailable) -> None:
        """End whatever is in flight."""
        kept, self._kept = self._kept, None
        self._bridge.fail(engine or (kept and kept[0]), error)

    def _farewell(self, life: Life) -> Unavailable:
        if self._stop.is_set():
            return Draining("the server is stopping")
        return Loading("the model is being loaded again") if life.replaced else engine_down()

    @staticmethod
    def _close(life: Life) -> None:
        try:
            life.group.close()
        except Exception:
            _log.exception("the ranks could not be cleared up in order")

    def _condemn(self, life: Life, cause: str) -> None:
        """This life is over: say so, once."""
        with self._lock:
            if life.cause is not None or self._stop.is_set():
                return
            life.cause, life.condemned_seconds = cause, self._clock()
            if life.replaced:  # its end is no news
                return
        _log.error("engine down: %s", cause)
        self._listener.engine_down(engine_down())

    # The thread that watches.

    def _watch(self) -> None:
        looked = self._clock()
        while not self._stop.wait(POLL_SECONDS):
            life = self._life
            if life is None or life.cause is not None:
                looked = self._clock()
                continue
            cause = self._find_cause(life)
            late_seconds = self._clock() - looked - POLL_SECONDS
            if late_seconds > PAUSE_SECONDS:
                self._excuse(life, late_seconds)
            elif cause is not None:
                self._condemn(life, cause)
                if not life.serving or self._is_step_overdue(life):
                    self._show_stacks(life)
                self._close(life)
                self._bridge.send(Wake())
            looked = self._clock()

    def _excuse(self, life: Life, seconds: float) -> None:
        """This process did not run for so long: what looks silent or slow says nothing about the ranks yet."""
        _log.warning("the server stood still for %.1f s: it was stopped, or its machine had no time for it", seconds)
        life.started_seconds += seconds
        life.steps.excuse(seconds)
        self._stop.wait(WAKE_SECONDS)

    def _find_cause(self, life: Life) -> str | None:
        """What is wrong with this life, if anything is."""
        if not life.serving:
            limit = self._config.start_timeout_seconds
            if self._clock() - life.started_seconds > limit + START_GRACE_SECONDS:
                return Loss(f"the ranks were not ready within {limit:g} s", "start")
        try:
            if life.serving:
                self._figures.tell(life.group)
            cause = life.group.dead_rank()
            if cause is None and life.serving and self._is_step_overdue(life):
                cause = Loss(life.steps.cause(self._hanging(life)), "hangs")
        except Exception as defect:
            _log.exception("the ranks cannot be watched")
            return f"{type(defect).__name__} while watching the ranks"
        return cause

    @staticmethod
    def _hanging(life: Life) -> str | None:
        """What the rank is called that the others wait for, if that can be told."""
        rank = life.group.hanging_rank()
        return None if rank is None or life.facts is None else life.facts.called(rank)

    def _is_step_overdue(self, life: Life) -> bool:
        began = self._bridge.step_started_seconds
        return began is not None and self._clock() - began > life.steps.limit_seconds()

    def _show_stacks(self, life: Life) -> None:
        """The only trace of why the ranks hang; they are gone in a moment."""
        try:
            life.group.dump_stacks()
        except Exception:
            _log.exception("the ranks' stacks could not be shown")
        self._stop.wait(STACKS_SECONDS)

    @staticmethod
    def _join(thread: threading.Thread, timeout_seconds: float | None) -> None:
        if thread.ident is not None:  # never started: nothing to wait for
            thread.join(timeout_seconds)


def _backoff_seconds(failures: int) -> float:
    """The first restart comes at once, each later one after twice the wait."""
    return 0.0 if failures <= 1 else min(LONGEST_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2.0 ** (failures - 2))
