"""Families of Prometheus series that say how requests, ranks and what is served fared; ``serve.metrics`` owns one of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from serve.engine.executor import ModelFacts
from serve.engine.stats import Recomputed, TenantStats

SECONDS: Final = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75,
    1.0, 1.5, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1280.0, 2560.0,
)  # fmt: skip
TOKENS: Final = (*(float(first * 10**exponent) for exponent in range(6) for first in (1, 2, 5)), 1e6)
"""Bounds of lengths: no model that is served has a longer context."""

RECOMPUTED: Final = ("preempted", "fair_share", "restarted")
"""Reasons for which positions are computed twice; a request that ends by an error wastes its own under that end's name."""
LOSS_REASONS: Final = ("died", "memory", "frozen", "hangs", "start", "broke")
SERVER_STATES: Final = ("loading", "serving", "draining", "down", "stopped")
RELOAD_RESULTS: Final = ("weights", "ranks", "taken_back", "refused")


class Maker:
    """Makes the series of one registry, all with the same prefix."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def counter(self, name: str, help_: str, *labels: str) -> Counter:
        return Counter(f"tessera_{name}", help_, labels, registry=self._registry)

    def gauge(self, name: str, help_: str, *labels: str) -> Gauge:
        return Gauge(f"tessera_{name}", help_, labels, registry=self._registry)

    def histogram(self, name: str, help_: str, buckets: Sequence[float] = SECONDS) -> Histogram:
        return Histogram(f"tessera_{name}", help_, registry=self._registry, buckets=buckets)


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """A request that ended by itself: what was generated and when, in seconds since its arrival."""

    queue_seconds: float
    first_token_seconds: float | None
    """``None`` where nothing was generated."""
    total_seconds: float
    longest_tokens: int
    """Tokens of its longest sequence."""
    trace_id: str = ""
    """The trace that the request is a part of; empty where it is not traced."""


def exemplar_of(trace_id: str) -> dict[str, str] | None:
    """What leads from a value of a histogram to the trace of the request that it is of."""
    return {"trace_id": trace_id} if trace_id else None


class RequestSeries:
    """How long requests were and where their time went; what was computed for nothing."""

    def __init__(self, make: Maker, end_reasons: Sequence[str]) -> None:
        """Make the series, at zero.

        Args:
            end_reasons: names of the ends by error, values of the label ``reason``.
        """
        self._prompt = make.histogram("request_prompt_tokens", "Prompt tokens of an accepted request, at its end.", TOKENS)
        self._output = make.histogram("request_generation_tokens", "Tokens generated for one, all its sequences.", TOKENS)
        self._prefill = make.histogram("request_prefill_time_seconds", "From the first step to the first token.")
        self._decode = make.histogram("request_decode_time_seconds", "From the first token to the end.")
        self._per_token = make.histogram(
            "request_time_per_output_token_seconds", "Mean time between tokens of a request's longest sequence."
        )
        self._unstarted = make.histogram(
            "request_unstarted_queue_time_seconds", "From arrival to the end by an error, of those that never had a step."
        )
        self._wasted = make.counter(
            "wasted_tokens", "Positions computed twice, or for requests that ended by an error.", "reason"
        )
        for reason in (*RECOMPUTED, *end_reasons):
            self._wasted.labels(reason)

    def measured(self, *, prompt_tokens: int, generation_tokens: int) -> None:
        """An accepted request ended, in whatever way, and was so long."""
        self._prompt.observe(prompt_tokens)
        self._output.observe(generation_tokens)

    def ended(self, course: Course) -> None:
        """A request ended by itself."""
        first = course.first_token_seconds
        if first is None:
            return
        decode_seconds = max(0.0, course.total_seconds - first)
        exemplar = exemplar_of(course.trace_id)
        self._prefill.observe(max(0.0, first - course.queue_seconds), exemplar)
        self._decode.observe(decode_seconds, exemplar)
        if course.longest_tokens > 1:
            self._per_token.observe(decode_seconds / (course.longest_tokens - 1), exemplar)

    def never_started(self, seconds: float) -> None:
        """A request ended by an error after it had waited so long for a first step that did not come."""
        self._unstarted.observe(seconds)

    def recomputed(self, now: Recomputed, before: Recomputed) -> None:
        """Positions that had to be computed again until now, of which those before are known."""
        for reason in RECOMPUTED:
            self.wasted(reason, getattr(now, reason) - getattr(before, reason))

    def wasted(self, reason: str, tokens: int) -> None:
        """So many positions were computed for nothing."""
        if tokens:
            self._wasted.labels(reason).inc(tokens)


class QueueSeries:
    """How long the queue makes wait at this moment, also while nothing moves."""

    def __init__(self, make: Maker, clock: Callable[[], float]) -> None:
        self.since_seconds: float | None = None
        """When the request that waits longest for its first step arrived, on the clock; ``None`` without one."""
        self._clock = clock
        gauge = make.gauge("queue_oldest_seconds", "For how long the oldest request without a first step has waited.")
        gauge.set_function(self._age)

    def _age(self) -> float:
        since = self.since_seconds
        return 0.0 if since is None else max(0.0, self._clock() - since)


class TenantSeries:
    """What each tenant asks for and has. No series of a tenant before its first request, and none where there are no tokens."""

    def __init__(self, make: Maker) -> None:
        self._refusals = make.counter("tenant_refusals", "Requests that the limits of their tenant refused.", "tenant", "limit")
        self._requests = make.counter("tenant_requests", "Requests of the tenant that the engine accepted.", "tenant")
        self._prompt_tokens = make.counter("tenant_prompt_tokens", "Prompt tokens of those whose prompt is ready.", "tenant")
        self._generation_tokens = make.counter("tenant_generation_tokens", "Tokens generated for the tenant.", "tenant")
        self._running = make.gauge("tenant_sequences_running", "Places of the running batch that the tenant has.", "tenant")
        self._queued = make.gauge("tenant_requests_queued", "Requests of the tenant that wait for their first step.", "tenant")
        self._held = make.gauge("tenant_requests_held", "Requests that wait for one of the tenant's own to end.", "tenant")
        self._known: set[str] = set()
        self._busy: set[str] = set()
        """Tenants of whom something ran or waited when the engine's figures came last."""

    def refused(self, tenant: str, limit: str) -> None:
        """A request was refused by the limits of its tenant; tenants are those that the file of tokens names."""
        self._refusals.labels(tenant, limit).inc()

    def accepted(self, tenant: str) -> None:
        """The engine took a request."""
        if self._knows(tenant):
            self._requests.labels(tenant).inc()

    def computed(self, tenant: str, prompt_tokens: int) -> None:
        """The prompt of a request is ready."""
        if self._knows(tenant):
            self._prompt_tokens.labels(tenant).inc(prompt_tokens)

    def generated(self, tenant: str, tokens: int) -> None:
        """Tokens came of a request."""
        if self._knows(tenant):
            self._generation_tokens.labels(tenant).inc(tokens)

    def held(self, tenant: str, requests: int) -> None:
        """So many requests wait for others of the tenant to end, before the engine knows of them."""
        if self._knows(tenant):
            self._held.labels(tenant).set(requests)

    def engine(self, tenants: Sequence[TenantStats]) -> None:
        """Something of these tenants runs or waits in the engine, and of no others."""
        for each in tenants:
            if self._knows(each.tenant):
                self._running.labels(each.tenant).set(each.sequences_running)
                self._queued.labels(each.tenant).set(each.requests_queued)
        busy = {each.tenant for each in tenants}
        for tenant in self._busy - busy:
            self._running.labels(tenant).set(0)
            self._queued.labels(tenant).set(0)
        self._busy = busy

    def _knows(self, tenant: str) -> bool:
        """Whether there are series of the tenant: with the first, all of them."""
        if tenant and tenant not in self._known:
            self._known.add(tenant)
            for family in (
                self._requests, self._prompt_tokens, self._generation_tokens, self._running, self._queued, self._held
            ):  # fmt: skip
                family.labels(tenant)
        return bool(tenant)


class RankSeries:
    """What the ranks have in memory, and why they were lost."""

    def __init__(self, make: Maker, num_ranks: int) -> None:
        memory = make.gauge(
            "rank_memory_bytes", "Memory of the rank: resident of the host, taken of the device.", "rank", "where"
        )
        self._memory = [(memory.labels(str(rank), "host"), memory.labels(str(rank), "device")) for rank in range(num_ranks)]
        self._failures = make.counter("engine_failures", "Lives of the engine that ended by a fault.", "reason")
        for reason in LOSS_REASONS:
            self._failures.labels(reason)

    def memory(self, ranks: Sequence[tuple[int, int]]) -> None:
        """Bytes resident on the host and taken of the device, in rank order."""
        for (host, device), (host_bytes, device_bytes) in zip(self._memory, ranks, strict=False):
            host.set(host_bytes)
            device.set(device_bytes)

    def gone(self) -> None:
        """There are no ranks any more: their memory is told as 0."""
        self.memory([(0, 0)] * len(self._memory))

    def lost(self, reason: str) -> None:
        """A life of the engine ended by a fault of this kind."""
        self._failures.labels(reason).inc()


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFigures:
    """What is known of the GPU of a rank; ``None`` for what it does not tell."""

    rank: int
    gpu: str
    """Its UUID."""
    memory_used_bytes: float | None = None
    memory_bytes: float | None = None
    utilization_ratio: float | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None
    clock_hertz: float | None = None


class GpuSeries:
    """The ranks' GPUs, of all processes on them. No series where there are none, or what a GPU tells is not read."""

    def __init__(self, make: Maker) -> None:
        self.names: tuple[str, ...] = ()
        """UUIDs of the ranks' GPUs, rank 0's first."""
        told = {
            "memory_used_bytes": "Memory of the rank's GPU that is taken, by whomever.",
            "memory_bytes": "Memory that the rank's GPU has.",
            "utilization_ratio": "Share of the last moment in which the rank's GPU computed anything.",
            "temperature_celsius": "Temperature of the rank's GPU.",
            "power_watts": "What the rank's GPU takes of electricity.",
            "clock_hertz": "Clock of the multiprocessors of the rank's GPU.",
        }
        self._gauges = {name: make.gauge(f"gpu_{name}", help_, "rank", "gpu") for name, help_ in told.items()}
        self._shown: set[tuple[str, str, str]] = set()

    def tell(self, gpus: Sequence[GpuFigures]) -> None:
        """Show these figures and no others."""
        shown = set()
        for figures in gpus:
            for name, gauge in self._gauges.items():
                if (value := getattr(figures, name)) is not None:
                    gauge.labels(str(figures.rank), figures.gpu).set(value)
                    shown.add((name, str(figures.rank), figures.gpu))
        for name, rank, gpu in self._shown - shown:
            self._gauges[name].remove(rank, gpu)
        self._shown = shown


class ServedSeries:
    """What the server does with requests now, what model it serves, and how old that is."""

    def __init__(self, make: Maker, num_ranks: int, num_stages: int) -> None:
        """``num_stages``: how many stages those ranks fall into."""
        self._sizes = str(num_ranks // num_stages), str(num_stages)
        self._model = make.gauge(
            "model_info", "1 for the model being served.",
            "model", "family", "dtype", "device", "tensor_parallel_size", "pipeline_parallel_size", "max_model_len",
            "num_parameters", "checkpoint_step", "attention", "linear", "kernels",
        )  # fmt: skip
        self._state = make.gauge("server_state", "1 for what the server does with new requests at this moment.", "state")
        self._reloads = make.counter("reloads", "Reloads that ended, by how.", "result")
        self._written = make.gauge("checkpoint_timestamp_seconds", "When the checkpoint that is served was written.")
        self._watch = make.gauge("watch_interval_seconds", "Between looks for a newer checkpoint; 0 without --watch.")
        for result in RELOAD_RESULTS:
            self._reloads.labels(result)
        self.entered("loading")

    def model(self, facts: ModelFacts, name: str) -> None:
        """The ranks serve a model, under this name."""
        self._model.clear()
        self._model.labels(
            name, facts.family, facts.dtype, facts.device, *self._sizes, str(facts.max_model_len), str(facts.num_parameters),
            "" if facts.checkpoint_step is None else str(facts.checkpoint_step), facts.attention, facts.linear, facts.kernels,
        ).set(1)  # fmt: skip

    def entered(self, state: str) -> None:
        """The server is in another state."""
        for name in SERVER_STATES:
            self._state.labels(name).set(name == state)

    def reloaded(self, result: str) -> None:
        """A reload ended with this result."""
        self._reloads.labels(result).inc()

    def written(self, seconds: float | None) -> None:
        """What is served was written then, in Unix time; ``None``: nobody knows."""
        self._written.set(0.0 if seconds is None else seconds)

    def follows(self, every_seconds: float | None) -> None:
        """The server looks for newer checkpoints so often; ``None``: never."""
        self._watch.set(every_seconds or 0.0)


class GuardSeries:
    """The files by which callers are let in, and the log of what they did."""

    def __init__(self, make: Maker) -> None:
        """Make the series, at zero."""
        self._refused_tokens = make.counter("token_reloads_refused", "Changed files of tokens that could not be used.")
        self._expiry = make.gauge(
            "certificate_expiry_timestamp_seconds", "When the certificate that is served ends, in Unix time; 0 without TLS."
        )
        self._refused_certificates = make.counter(
            "certificate_reloads_refused", "Changed files of certificates that could not be served."
        )
        self._lost_audit_lines = make.counter("audit_lines_lost", "Lines that the audit log does not have.")

    def tokens_refused(self) -> None:
        """The file of tokens has changed and could not be used."""
        self._refused_tokens.inc()

    def certificate_served(self, expires_seconds: float) -> None:
        """The ports that speak TLS show a certificate from now on that ends then, in Unix time."""
        self._expiry.set(expires_seconds)

    def certificate_refused(self) -> None:
        """The files of certificates have changed and could not be served."""
        self._refused_certificates.inc()

    def audit_line_lost(self) -> None:
        """A line could not be written, or had to make room."""
        self._lost_audit_lines.inc()
