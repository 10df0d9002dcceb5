"""The Prometheus series of the server. Fed with values; knows neither engine nor gRPC.

Every label set exists from the start, so that ``rate()`` works from the first event on. Counters are monotone for the life
of the process, whatever happens to the engine.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from typing import Any, Final
from wsgiref.types import WSGIApplication

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
    make_wsgi_app,
)

from host import endpoint
from host.endpoint import MetricsEndpoint, Wrap
from host.exposition import NamedRegistry
from serve.engine.executor import ModelFacts
from serve.engine.stats import EngineStats
from serve.engine.swap import Swapped
from serve.errors import (
    ConfigError,
    DeadlineExpired,
    Draining,
    EngineDown,
    Loading,
    NotFinite,
    PutOut,
    QueueFull,
    RequestAborted,
    ServeError,
    SlowReader,
    Unavailable,
)
from serve.series import (
    SECONDS,
    Course,
    GpuSeries,
    GuardSeries,
    Maker,
    QueueSeries,
    RankSeries,
    RequestSeries,
    ServedSeries,
    TenantSeries,
    exemplar_of,
)
from serve.types import FinishReason, RequestFailed

METHODS: Final = (
    "Generate", "GenerateStream", "GenerateBatch", "Score",
    "Tokenize", "Detokenize", "RenderChat",
    "GetModel", "ListModels",
    "Abort", "Drain", "Reload", "FlushPrefixCache", "Profile", "GetLoad",
)  # fmt: skip
"""Values of the label ``method``; anything else counts as ``_OTHER``."""

CODES: Final = (
    "OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS", "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE",
    "DATA_LOSS", "UNAUTHENTICATED",
)  # fmt: skip
"""gRPC's status codes, values of the label ``code``."""

OTHER: Final = "_OTHER"
END_OF_ERROR: Final[dict[type[ServeError], str]] = {
    RequestAborted: "cancelled",
    DeadlineExpired: "deadline",
    SlowReader: "slow_reader",
    PutOut: "put_out",
    Draining: "draining",
    EngineDown: "engine_down",
}
"""How ``request_finished_total`` names an end by error; every other error is ``broke``."""

END_REASONS: Final = (*(reason.value for reason in FinishReason), *END_OF_ERROR.values(), "broke")
REJECTION_REASONS: Final = ("requests", "tokens", "bytes", "loading", "draining", "engine_down")
LOAD_PHASES: Final = ("import", "build", "weights", "cache")

STEP_TOKENS: Final = tuple(float(2**exponent) for exponent in range(15))


Guard = Callable[[WSGIApplication], WSGIApplication]
"""Makes of what answers every request what answers some."""


class Metrics:
    """Owns the registry and every series in it. May be called from any thread."""

    def __init__(
        self,
        *,
        version: str,
        num_ranks: int,
        num_stages: int = 1,
        model_name: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make all series, at zero.

        Args:
            version: of the package, for ``build_info``.
            num_ranks: how many values the label ``rank`` has; those ranks fall into ``num_stages``.
            model_name: the name clients see, which every series bears where it is shown.
            clock: the one that arrivals are on.
        """
        disable_created_metrics()  # type: ignore[no-untyped-call]  # prometheus_client leaves it unannotated
        self.registry = CollectorRegistry()
        """The series without ``model_name``, which is put on as they are shown: what counts pays nothing for it."""
        self._shown = NamedRegistry(self.registry, model_name)
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self._make_request_series()
        self._make_engine_series()
        self._make_rank_series(num_ranks)
        make = Maker(self.registry)
        self.lengths = RequestSeries(make, (*END_OF_ERROR.values(), "broke"))
        self.ranks = RankSeries(make, num_ranks)
        self.gpus = GpuSeries(make)
        self._queue = QueueSeries(make, clock)
        self.tenants = TenantSeries(make)
        self.guard = GuardSeries(make)
        self._served = ServedSeries(make, num_ranks, num_stages)
        info = self._gauge("build_info", "Always 1; what is running.", "version", "python")
        info.labels(version, platform.python_version()).set(1)
        self._last_stats: EngineStats | None = None

    def _make_request_series(self) -> None:
        self._requests = self._counter("requests", "Calls that ended, by RPC method and gRPC status code.", "method", "code")
        for method in (*METHODS, OTHER):
            for code in CODES:
                self._requests.labels(method, code)
        self._finished = self._counter(
            "request_finished", "Accepted requests that ended, by the reason of their last sequence.", "reason"
        )
        self._rejections = self._counter("rejections", "Generation requests refused for want of room or service.", "reason")
        self._not_finite = self._counter("nonfinite_requests", "Requests ended because the model's logits were not finite.")
        _make_all(self._finished, END_REASONS)
        _make_all(self._rejections, REJECTION_REASONS)
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests whose prompt became ready.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated, as in the usage of each sequence.")
        self._first_token = self._histogram("time_to_first_token_seconds", "From a request's arrival to its first token.")
        self._inter_token = self._histogram("inter_token_latency_seconds", "Between two tokens of one sequence.")
        self._latency = self._histogram("e2e_request_latency_seconds", "From arrival to the end, if not by an error.")
        self._queue_time = self._histogram("request_queue_time_seconds", "From arrival to the first step, likewise.")

    def _make_engine_series(self) -> None:
        self._running = self._gauge("num_requests_running", "Requests with a sequence in the running batch.")
        self._waiting = self._gauge("num_requests_waiting", "Live requests with none.")
        self._queued_tokens = self._gauge("queued_prompt_tokens", "Prompt tokens of the waiting requests.")
        self._blocks_used = self._gauge("kv_blocks_used", "KV blocks that live sequences hold.")
        self._blocks_cached = self._gauge("kv_blocks_cached", "KV blocks nobody holds, kept for reuse by equal prefixes.")
        self._blocks_total = self._gauge("kv_blocks", "KV blocks in the pool.")
        self._usage = self._gauge("kv_usage_ratio", "Share of the pool's blocks that live sequences hold.")
        self._preemptions = self._counter("preemptions", "Sequences preempted to make room.")
        self._overtaken = self._counter("steps_overtaken", "Steps given up for another tenant's prompt, and computed anew.")
        self._cache_queries = self._counter("prefix_cache_queries", "Tokens looked up in the prefix cache.")
        self._cache_hits = self._counter("prefix_cache_hits", "Tokens found in the prefix cache.")
        self._proposed = self._counter("speculative_proposed_tokens", "Tokens guessed ahead and verified by the model.")
        self._accepted = self._counter("speculative_accepted_tokens", "Tokens of those that became output.")
        self._step_seconds = self._histogram("step_seconds", "Duration of one engine step.")
        self._step_tokens = self._histogram("step_tokens", "Positions computed in one engine step.", STEP_TOKENS)
        self._engine_up = self._gauge("engine_up", "1 while the engine takes requests.")
        self._restarts = self._counter("engine_restarts", "Times the supervisor started the ranks again.")
        self._kept = self._counter("requests_kept", "Requests that went on with new ranks after the death of theirs.")
        self._swaps = self._counter("weight_swaps", "Times newer weights were taken between two steps.")
        self._swap_seconds = self._histogram("weight_swap_seconds", "For how long an exchange of weights kept steps waiting.")
        self._refused_reloads = self._counter("reloads_refused", "Checkpoints that were to be served and could not be.")
        self._loop_lag = self._gauge("event_loop_lag_seconds", "How late the event loop's last wake-up was.")
        self._load_seconds = self._gauge("model_load_seconds", "Duration of each phase of the last model load.", "phase")
        _make_all(self._load_seconds, LOAD_PHASES)

    def _make_rank_series(self, num_ranks: int) -> None:
        up = self._gauge("rank_up", "1 while the rank's process is alive and answers.", "rank")
        age = self._gauge("rank_heartbeat_age_seconds", "Since the rank was last heard of.", "rank")
        self._rank_up = [up.labels(str(rank)) for rank in range(num_ranks)]
        self._rank_age = [age.labels(str(rank)) for rank in range(num_ranks)]

    def _counter(self, name: str, help_: str, *labels: str) -> Counter:
        return Counter(f"tessera_{name}", help_, labels, registry=self.registry)

    def _gauge(self, name: str, help_: str, *labels: str) -> Gauge:
        return Gauge(f"tessera_{name}", help_, labels, registry=self.registry)

    def _histogram(self, name: str, help_: str, buckets: Sequence[float] = SECONDS) -> Histogram:
        return Histogram(f"tessera_{name}", help_, registry=self.registry, buckets=buckets)

    # Calls and requests.

    def request_ended(self, method: str, code: str) -> None:
        """Count one finished call.

        Args:
            method: the RPC's name, ``Generate`` or ``/serve.v1.Inference/Generate``.
            code: the name of its gRPC status, for example ``OK``.
        """
        name = method.rpartition("/")[2]
        self._requests.labels(name if name in METHODS else OTHER, code if code in CODES else "UNKNOWN").inc()

    def rejected(self, error: ServeError) -> None:
        """Count a generation request that was refused; an error that is not about room or service is no rejection."""
        if isinstance(error, QueueFull):
            self._rejections.labels(error.reason).inc()
        elif isinstance(error, Unavailable):
            reason = "loading" if isinstance(error, Loading) else "draining" if isinstance(error, Draining) else "engine_down"
            self._rejections.labels(reason).inc()

    def prompt_computed(self, tokens: int) -> None:
        self._prompt_tokens.inc(tokens)

    def tokens_generated(self, count: int) -> None:
        self._generation_tokens.inc(count)

    def first_token(self, seconds: float, trace_id: str = "") -> None:
        self._first_token.observe(seconds, exemplar_of(trace_id))

    def next_token(self, seconds: float) -> None:
        self._inter_token.observe(seconds)

    def finished(self, reason: FinishReason, course: Course) -> None:
        """Count a request that ended by itself."""
        self._finished.labels(reason.value).inc()
        exemplar = exemplar_of(course.trace_id)
        self._queue_time.observe(course.queue_seconds, exemplar)
        self._latency.observe(course.total_seconds, exemplar)
        self.lengths.ended(course)

    def failed(self, event: RequestFailed, *, total_seconds: float) -> None:
        """Count an accepted request that ended with an error, so long after its arrival."""
        error = event.error
        names = (END_OF_ERROR[kind] for kind in type(error).__mro__ if kind in END_OF_ERROR)
        reason = next(names, "broke")
        self._finished.labels(reason).inc()
        self.lengths.wasted(reason, event.computed_tokens)
        if event.queue_seconds is None:
            self.lengths.never_started(total_seconds)
        if isinstance(error, NotFinite):
            self._not_finite.inc()

    # The engine and its ranks.

    def engine_started(self, stats: EngineStats, facts: ModelFacts, *, model: str) -> None:
        """A new engine on new ranks takes over: its totals count from ``stats`` on."""
        self._last_stats = stats
        self._set_gauges(stats)
        for gauge in (self._engine_up, *self._rank_up):
            gauge.set(1)
        for phase, seconds in facts.load_seconds:
            self._load_seconds.labels(phase).set(seconds)
        self.gpus.names = facts.gpus
        self.model_served(facts, model=model)

    def model_served(self, facts: ModelFacts, *, model: str) -> None:
        """What the ranks serve from now on."""
        self._served.model(facts, model)

    def engine_stopped(self) -> None:
        """The engine is gone, and everything it held and its ranks with it."""
        held = (self._running, self._waiting, self._queued_tokens, self._blocks_used, self._blocks_cached, self._usage)
        for gauge in (self._engine_up, *self._rank_up, *held):
            gauge.set(0)
        self.ranks.gone()
        self.tenants.engine(())
        self._queue.since_seconds = None

    def engine_waits(self, stats: EngineStats) -> None:
        """The engine has no ranks; its requests wait for the next ones."""
        self._kept.inc(stats.num_waiting)
        self._waiting.set(stats.num_waiting)
        self._queued_tokens.set(stats.queued_tokens)
        self._queue.since_seconds = stats.queued_since_seconds
        self.tenants.engine(stats.tenants)

    def engine_failed(self, reason: str) -> None:
        """A life of the engine ended by a fault; see ``serve.engine.executor.LossReason``."""
        self.ranks.lost(reason)

    def engine_restarted(self) -> None:
        self._restarts.inc()

    def swap_ended(self, swapped: Swapped) -> None:
        """The ranks exchanged their weights, or refused to."""
        self._swap_seconds.observe(swapped.seconds)
        if not swapped.refused:
            self._swaps.inc()

    def reload_refused(self) -> None:
        """What the model's folder held could not be served."""
        self._refused_reloads.inc()

    def reloaded(self, result: str) -> None:
        """A reload ended: ``weights`` were exchanged, ``ranks`` started again, it was ``taken_back`` or ``refused``."""
        self._served.reloaded(result)

    def server_entered(self, state: str) -> None:
        """The server does something else with new requests from now on; see ``serve.runtime.state.State``."""
        self._served.entered(state)

    def checkpoint_served(self, written_seconds: float | None) -> None:
        """What is served from now on was written then, in Unix time."""
        self._served.written(written_seconds)

    def follows(self, every_seconds: float | None) -> None:
        """The server looks for a newer checkpoint so often, if it does."""
        self._served.follows(every_seconds)

    def engine_advanced(self, stats: EngineStats) -> None:
        """Take over the engine's figures after it did something."""
        last = self._last_stats
        assert last is not None, "engine_started comes first"
        self._last_stats = stats
        self._set_gauges(stats)
        _add(self._preemptions, stats.preemptions - last.preemptions)
        _add(self._overtaken, stats.steps_overtaken - last.steps_overtaken)
        _add(self._cache_queries, stats.prefix_cache_queries - last.prefix_cache_queries)
        _add(self._cache_hits, stats.prefix_cache_hits - last.prefix_cache_hits)
        self.lengths.recomputed(stats.recomputed, last.recomputed)
        _add(self._proposed, stats.proposed_tokens - last.proposed_tokens)
        _add(self._accepted, stats.accepted_tokens - last.accepted_tokens)
        if stats.steps > last.steps and stats.last_step is not None and stats.last_step.tokens:
            self._step_seconds.observe(stats.last_step.seconds)
            self._step_tokens.observe(stats.last_step.tokens)

    def heartbeat_ages(self, ages_seconds: Sequence[float]) -> None:
        """How long ago each rank was heard of, in rank order."""
        for gauge, age in zip(self._rank_age, ages_seconds, strict=True):
            gauge.set(age)

    def event_loop_lag(self, seconds: float) -> None:
        self._loop_lag.set(seconds)

    def _set_gauges(self, stats: EngineStats) -> None:
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._queued_tokens.set(stats.queued_tokens)
        self._queue.since_seconds = stats.queued_since_seconds
        self._blocks_used.set(stats.kv_blocks_used)
        self._blocks_cached.set(stats.kv_blocks_cached)
        self._blocks_total.set(stats.kv_blocks_total)
        self._usage.set(stats.kv_blocks_used / max(1, stats.kv_blocks_total))
        self.tenants.engine(stats.tenants)

    # Reading.

    def exposition(self) -> str:
        """Everything in Prometheus' text format."""
        return generate_latest(self._shown).decode()

    def listen(self, host: str, port: int, *, wrap: Wrap | None = None, guard: Guard | None = None) -> MetricsEndpoint:
        """Serve the registry over HTTP on a thread of its own.

        Args:
            wrap: makes TLS of each connection; plain without it.
            guard: makes of what answers everyone what answers some.

        Raises:
            ConfigError: the address cannot be bound.
        """
        app = make_wsgi_app(self._shown)
        bare_host = "127.0.0.1" if host.startswith("unix:") else host.strip("[]")
        try:
            return endpoint.listen(guard(app) if guard else app, bare_host, port, wrap=wrap)
        except OSError as error:
            raise ConfigError(f"rpc.metrics_port: cannot listen on {bare_host}:{port}: {error.strerror or error}") from error


def _make_all(family: Any, values: Sequence[str]) -> None:
    for value in values:
        family.labels(value)


def _add(counter: Counter, amount: int) -> None:
    if amount:
        counter.inc(amount)
