"""Traces by OpenTelemetry: a span for each call, below it one for each request, with its queue, prefill, decode and stream.

Names and attributes are those of the conventions for RPC and for generative AI as of 2026; the latter are not stable yet.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Final, Self

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, format_trace_id
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from serve.tracing.config import TracingConfig
from serve.tracing.seam import CallTrace, Metadata, RequestTrace
from serve.types import Event, FinishReason, Generation, PromptReady, RequestFailed, SequenceFinished, Timings

PROVIDER: Final = "tessera"
OPERATION: Final = "text_completion"
EXPORT_SECONDS: Final = 5
"""For one attempt to send; a collector that is not there keeps nobody waiting but the thread that sends."""
CLOSE_SECONDS: Final = 3.0
SERVER_FAULTS: Final = ("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS")
"""Statuses that make an error of a server's span, by the conventions for gRPC; others are the caller's."""
_CARRIED: Final = ("traceparent", "tracestate")
_FINISHED: Final = {FinishReason.LENGTH: "length"}
"""The conventions' names of ends; every other is a ``stop``."""
_PROPAGATOR: Final = TraceContextTextMapPropagator()


def open_otel(config: TracingConfig, *, version: str, model: str) -> OtelTracing:
    """Traces that are sent to ``config.otlp_endpoint`` from a thread of their own."""
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    resource = Resource.create({"service.name": "tessera-serve", "service.version": version})
    provider = TracerProvider(sampler=ParentBased(TraceIdRatioBased(config.trace_ratio)), resource=resource)
    exporter = OTLPSpanExporter(
        endpoint=config.otlp_endpoint, insecure=config.otlp_endpoint.startswith("http://"), timeout=EXPORT_SECONDS
    )
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return OtelTracing(provider, model=model)


class OtelTracing:
    """Makes spans of OpenTelemetry: one for each call, below a caller's ``traceparent``, and one for each request in a call.

    Belongs to the event loop.
    """

    def __init__(self, provider: TracerProvider, *, model: str, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            provider: takes the spans, and says which calls are traced.
            model: the name clients see.
            clock: the one that arrivals are on.
        """
        self._provider = provider
        self._tracer = provider.get_tracer("tessera")
        self._model = model
        self._clock = clock

    def call(self, method: str, metadata: Callable[[], Metadata | None]) -> CallTrace:
        carrier = {key: value for key, value in metadata() or () if key in _CARRIED and isinstance(value, str)}
        attributes = {"rpc.system.name": "grpc", "rpc.method": method}
        parent = _PROPAGATOR.extract(carrier)
        return _Call(self._tracer.start_span(method, context=parent, kind=SpanKind.SERVER, attributes=attributes))

    def request(self, generation: Generation) -> RequestTrace | None:
        if not trace.get_current_span().is_recording():
            return None
        return _Request(self._tracer, generation, self._model, self._clock)

    def close(self) -> None:
        # It waits for a collector that does not answer as long as for one that does.
        closing = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)


class _Call:
    """The span of one call."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self._within: AbstractContextManager[Span] | None = None

    def ended(self, code: str) -> None:
        self._span.set_attribute("rpc.response.status_code", code)
        if code in SERVER_FAULTS:
            self._span.set_attribute("error.type", code)
            self._span.set_status(Status(StatusCode.ERROR))

    def __enter__(self) -> Self:
        self._within = trace.use_span(self._span, end_on_exit=True, record_exception=False, set_status_on_exception=False)
        self._within.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None:
        assert self._within is not None, "a call ends once it has begun"
        self._within.__exit__(kind, error, traceback)


class _Request:
    """The span of one request, and those of its phases, which are made when all of it is known."""

    def __init__(self, tracer: Tracer, generation: Generation, model: str, clock: Callable[[], float]) -> None:
        self._tracer = tracer
        self._began_ns = time.time_ns() - round(max(0.0, clock() - generation.arrival_seconds) * 1e9)
        self._timings: Timings | None = None
        self._queue_seconds: float | None = None
        self._first_told_ns: int | None = None
        self._output_tokens = 0
        self._reasons: list[str] = []
        self._span = tracer.start_span(
            f"{OPERATION} {model}", attributes=_attributes(generation, model), start_time=self._began_ns
        )

    @property
    def trace_id(self) -> str:
        return format_trace_id(self._span.get_span_context().trace_id)

    def saw(self, event: Event) -> None:
        if self._first_told_ns is None:
            self._first_told_ns = time.time_ns()
        if isinstance(event, PromptReady):
            self._span.set_attribute("gen_ai.usage.input_tokens", event.prompt_tokens)
            self._span.set_attribute("gen_ai.usage.cache_read.input_tokens", event.cached_tokens)
        elif isinstance(event, SequenceFinished):
            self._output_tokens += event.usage.completion_tokens
            self._reasons.append(_FINISHED.get(event.reason, "stop"))
            self._timings, self._queue_seconds = event.timings, event.timings.queue_seconds
        elif isinstance(event, RequestFailed):
            self._queue_seconds = event.queue_seconds

    def failed(self, error: Exception) -> None:
        self._span.set_attribute("error.type", type(error).__name__)
        self._span.set_status(Status(StatusCode.ERROR))

    def over(self) -> None:
        if self._reasons:
            self._span.set_attribute("gen_ai.usage.output_tokens", self._output_tokens)
            self._span.set_attribute("gen_ai.response.finish_reasons", self._reasons)
        if self._queue_seconds is not None:
            self._phase("queue", 0.0, self._queue_seconds)
        if self._timings is not None:
            self._phase("prefill", self._timings.queue_seconds, self._timings.first_token_seconds)
            self._phase("decode", self._timings.first_token_seconds, self._timings.total_seconds)
        now_ns = time.time_ns()
        if self._first_told_ns is not None:
            self._child("stream", self._first_told_ns, now_ns)
        self._span.end(end_time=now_ns)

    def _phase(self, name: str, begin_seconds: float, end_seconds: float) -> None:
        self._child(name, self._began_ns + round(begin_seconds * 1e9), self._began_ns + round(end_seconds * 1e9))

    def _child(self, name: str, begin_ns: int, end_ns: int) -> None:
        span = self._tracer.start_span(name, context=trace.set_span_in_context(self._span), start_time=begin_ns)
        span.end(end_time=max(begin_ns, end_ns))


def _attributes(generation: Generation, model: str) -> dict[str, Any]:
    """What the request asks for; never what it says."""
    sampling = generation.sampling
    return {
        "gen_ai.operation.name": OPERATION,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model,
        "gen_ai.request.max_tokens": generation.stopping.max_new_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        # As text: OpenTelemetry's whole numbers have 63 bits, a seed has 64.
        "gen_ai.request.seed": str(sampling.seed),
        "gen_ai.request.choice.count": generation.num_sequences,
        "gen_ai.response.id": generation.request_id,
        "gen_ai.response.model": model,
    }
