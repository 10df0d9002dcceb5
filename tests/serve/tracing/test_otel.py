"""Traces: the caller's goes on through queue, prefill, decode and stream; nothing of what is said is in it; off is off."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent import futures
from dataclasses import dataclass

import grpc
import pytest
from prometheus_client.openmetrics.exposition import generate_latest

from serve.config import ModelConfig, ServerConfig
from serve.errors import ConfigError
from serve.tracing.config import TracingConfig
from serve.tracing.opening import open_tracing
from serve.tracing.seam import NoTracing
from tests.serve.rpc.running import RunningServer, request, serving

pytest.importorskip("opentelemetry.sdk", reason="traces are not tried: opentelemetry is missing (pip install 'tessera[otel]')")

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased

from serve.tracing.otel import OtelTracing, open_otel

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"
SAMPLED = (("traceparent", f"00-{TRACE_ID}-{CALLER}-01"),)
NOT_SAMPLED = (("traceparent", f"00-{TRACE_ID}-{CALLER}-00"),)


@dataclass(frozen=True)
class Traced:
    """A server, and the spans that it has ended."""

    server: RunningServer
    exporter: InMemorySpanExporter

    async def spans(self, ready: Callable[[dict[str, ReadableSpan]], bool]) -> dict[str, ReadableSpan]:
        """By name, once they are such."""
        async with asyncio.timeout(60.0):
            while not ready(found := {span.name: span for span in self.exporter.get_finished_spans()}):  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        return found


@pytest.fixture
async def traced() -> AsyncIterator[Traced]:
    """Traces where the caller does, and nothing else."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler=ParentBased(ALWAYS_OFF))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with serving(tracing=OtelTracing(provider, model="fake")) as server:
        yield Traced(server, exporter)
    provider.shutdown()


def below(span: ReadableSpan, parent: ReadableSpan) -> bool:
    assert span.context is not None
    assert parent.context is not None
    return span.parent is not None and span.parent.span_id == parent.context.span_id


async def test_the_callers_trace_goes_on_through_queue_prefill_decode_and_stream(traced: Traced) -> None:
    asked = request((5, 6, 7), 6, request_id="mine", sampling={"seed": 2**64 - 1, "temperature": 0})
    assert [event async for event in traced.server.inference.GenerateStream(asked, metadata=SAMPLED)]
    method = "serve.v1.Inference/GenerateStream"
    spans = await traced.spans(lambda found: method in found and "stream" in found)
    assert set(spans) == {method, "text_completion fake", "queue", "prefill", "decode", "stream"}
    assert {f"{span.context.trace_id:032x}" for span in spans.values() if span.context} == {TRACE_ID}
    call, whole = spans[method], spans["text_completion fake"]
    assert call.parent is not None
    assert f"{call.parent.span_id:016x}" == CALLER
    assert dict(call.attributes or {}) == {
        "rpc.system.name": "grpc", "rpc.method": method, "rpc.response.status_code": "OK"
    }  # fmt: skip
    assert below(whole, call)
    phases = [spans[name] for name in ("queue", "prefill", "decode", "stream")]
    assert all(below(phase, whole) for phase in phases)
    assert [phase.end_time for phase in phases[:2]] == [phase.start_time for phase in phases[1:3]], "one after the other"
    assert all((span.start_time or 0) <= (span.end_time or 0) for span in spans.values())
    attributes = dict(whole.attributes or {})
    assert attributes["gen_ai.operation.name"] == "text_completion"
    assert attributes["gen_ai.provider.name"] == "tessera"
    assert attributes["gen_ai.request.model"] == "fake"
    assert attributes["gen_ai.request.max_tokens"] == 6
    assert attributes["gen_ai.request.seed"] == str(2**64 - 1)
    assert attributes["gen_ai.response.id"] == "mine"
    assert attributes["gen_ai.usage.input_tokens"] == 3
    assert attributes["gen_ai.usage.output_tokens"] == 6
    assert attributes["gen_ai.response.finish_reasons"] == ("length",)


async def test_every_request_of_a_batch_has_its_span(traced: Traced) -> None:
    async def requests() -> AsyncIterator[object]:
        for name in ("a", "b"):
            yield request(request_id=name)

    assert [event async for event in traced.server.inference.GenerateBatch(requests(), metadata=SAMPLED)]
    await traced.spans(lambda found: "serve.v1.Inference/GenerateBatch" in found)
    wholes = [span for span in traced.exporter.get_finished_spans() if span.name == "text_completion fake"]
    assert sorted(str((span.attributes or {})["gen_ai.response.id"]) for span in wholes) == ["a", "b"]


async def test_a_caller_who_is_not_traced_leaves_no_span(traced: Traced) -> None:
    await traced.server.inference.Generate(request(), metadata=NOT_SAMPLED)
    await traced.server.inference.Generate(request())
    await traced.server.inference.Generate(request(), metadata=(("traceparent", "nonsense"),))
    await traced.server.inference.Generate(request(), metadata=SAMPLED)
    await traced.spans(lambda found: "serve.v1.Inference/Generate" in found)
    assert len([span for span in traced.exporter.get_finished_spans() if span.name.endswith("/Generate")]) == 1


async def test_a_refused_call_and_one_that_is_given_up_say_so(traced: Traced) -> None:
    with pytest.raises(grpc.aio.AioRpcError):
        await traced.server.inference.Generate(request(sampling={"temperature": -1.0}), metadata=SAMPLED)
    spans = await traced.spans(lambda found: "serve.v1.Inference/Generate" in found)
    refused = spans["serve.v1.Inference/Generate"]
    assert (refused.attributes or {})["rpc.response.status_code"] == "INVALID_ARGUMENT"
    assert refused.status.is_unset, "the caller's mistake"
    ranks = traced.server.ranks
    ranks.last_step = ranks.num_steps + 3
    call = traced.server.inference.GenerateStream(request(tokens=200), metadata=SAMPLED)
    await call.read()
    call.cancel()
    await traced.server.until(lambda: traced.server.gateway.num_in_flight == 0)
    ranks.last_step = None
    spans = await traced.spans(lambda found: "text_completion fake" in found and "serve.v1.Inference/GenerateStream" in found)
    assert (spans["serve.v1.Inference/GenerateStream"].attributes or {})["rpc.response.status_code"] == "CANCELLED"
    assert (spans["text_completion fake"].attributes or {})["error.type"] == "RequestAborted"
    assert not spans["text_completion fake"].status.is_ok


async def test_nothing_that_is_said_is_traced(traced: Traced) -> None:
    await traced.server.inference.Generate(
        request(text="zebra crossing", stopping={"stop_strings": ["zebra"]}), metadata=SAMPLED
    )
    await traced.spans(lambda found: "serve.v1.Inference/Generate" in found)
    assert "zebra" not in "".join(span.to_json() for span in traced.exporter.get_finished_spans())


async def test_metrics_lead_to_the_trace_of_a_request(traced: Traced) -> None:
    await traced.server.inference.Generate(request(), metadata=SAMPLED)
    await traced.server.inference.Generate(request())
    text = generate_latest(traced.server.metrics.registry).decode()
    lines = [line for line in text.splitlines() if f'# {{trace_id="{TRACE_ID}"}}' in line]
    assert {line.split("_bucket")[0] for line in lines} == {
        f"tessera_{name}_seconds"
        for name in (
            "time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time", "request_decode_time",
            "request_time_per_output_token",
        )
    }  # fmt: skip


class _Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.names: list[str] = []

    def Export(self, request, context):  # type: ignore[no-untyped-def]
        self.names += [span.name for each in request.resource_spans for scope in each.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture
def collector() -> Iterator[tuple[_Collector, str]]:
    """What takes OTLP, on loopback."""
    server, taken = grpc.server(futures.ThreadPoolExecutor(max_workers=1)), _Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(taken, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield taken, f"http://127.0.0.1:{port}"
    server.stop(0).wait()


async def test_spans_reach_a_collector_before_the_server_ends(collector: tuple[_Collector, str]) -> None:
    taken, address = collector
    tracing = open_otel(TracingConfig(otlp_endpoint=address, trace_ratio=1.0), version="1", model="fake")
    async with serving(tracing=tracing) as server:
        await server.inference.Generate(request())
    await asyncio.to_thread(tracing.close)
    assert sorted(taken.names) == sorted(
        ["serve.v1.Inference/Generate", "text_completion fake", "queue", "prefill", "decode", "stream"]
    )


def test_a_wrong_option_and_a_missing_package_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"tracing\.otlp_endpoint is 'collector:4317'; it must begin with http://"):
        TracingConfig(otlp_endpoint="collector:4317")
    with pytest.raises(ConfigError, match=r"tracing\.trace_ratio is 2.0; it must lie between 0 and 1"):
        TracingConfig(trace_ratio=2.0)
    config = ServerConfig(model=ModelConfig(path="/models/fake"), tracing=TracingConfig(otlp_endpoint="http://127.0.0.1:1"))
    monkeypatch.delitem(sys.modules, "serve.tracing.otel")
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError, match=r"opentelemetry is not installed: pip install 'tessera\[otel\]'"):
        open_tracing(config, "1")


def test_off_it_imports_nothing() -> None:
    assert isinstance(open_tracing(ServerConfig(model=ModelConfig(path="/models/fake")), "1"), NoTracing)
    words = "import serve.app, serve.rpc.server, sys; print([name for name in sys.modules if 'opentelemetry' in name])"
    said = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, timeout=300, check=True).stdout
    assert said.strip() == "[]"
