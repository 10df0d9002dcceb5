"""A whole server sends its traces, and ends in order whether or not anything takes them."""

from __future__ import annotations

from concurrent import futures
from pathlib import Path

import grpc
import pytest

from serve.v1 import inference_pb2
from tests.support.server import serving

pytest.importorskip("opentelemetry.sdk", reason="traces are not tried: opentelemetry is missing (pip install 'tessera[otel]')")

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

pytestmark = pytest.mark.slow


class _Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.services: set[str] = set()
        self.names: set[str] = set()

    def Export(self, request, context):  # type: ignore[no-untyped-def]
        for each in request.resource_spans:
            self.services |= {a.value.string_value for a in each.resource.attributes if a.key == "service.name"}
            self.names |= {span.name for scope in each.scope_spans for span in scope.spans}
        return trace_service_pb2.ExportTraceServiceResponse()


def ask() -> inference_pb2.GenerateRequest:
    asked = inference_pb2.GenerateRequest(token_ids={"ids": [5, 6, 7]})
    asked.stopping.max_new_tokens = 4
    return asked


def test_what_is_traced_has_arrived_when_the_server_has_ended(folder: Path) -> None:
    collector, taken = grpc.server(futures.ThreadPoolExecutor(max_workers=1)), _Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(taken, collector)
    port = collector.add_insecure_port("127.0.0.1:0")
    collector.start()
    try:
        words = ("--otlp-endpoint", f"http://127.0.0.1:{port}", "--trace-ratio", "1", "--model-name", "mine")
        with serving(folder, *words) as server:
            server.inference.Generate(ask(), timeout=60)
    finally:
        collector.stop(0).wait()
    assert taken.services == {"tessera-serve"}
    assert taken.names == {"serve.v1.Inference/Generate", "text_completion mine", "queue", "prefill", "decode", "stream"}


def test_a_collector_that_is_not_there_costs_no_call_and_no_orderly_end(folder: Path) -> None:
    with serving(folder, "--otlp-endpoint", "http://127.0.0.1:1", "--trace-ratio", "1") as server:
        assert server.inference.Generate(ask(), timeout=60).completions[0].token_ids
