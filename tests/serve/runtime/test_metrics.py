"""The series: their names and labels are a contract, their counts are exact."""

from __future__ import annotations

import re
import urllib.request
from typing import get_args

import pytest

from serve.engine.executor import LossReason, ModelFacts
from serve.engine.stats import EngineStats, Recomputed, StepStats
from serve.errors import (
    ConfigError,
    DeadlineExpired,
    Draining,
    EngineDown,
    InvalidRequest,
    Loading,
    QueueFull,
    RequestAborted,
    RequestBroke,
    SlowReader,
)
from serve.metrics import CODES, METHODS, Metrics
from serve.runtime.ledger import Ledger
from serve.runtime.state import State
from serve.types import (
    FinishReason,
    Generation,
    PromptReady,
    RequestFailed,
    RequestId,
    SamplingParams,
    SequenceFinished,
    StoppingParams,
    Timings,
    TokensOut,
    Usage,
)
from tests.support.ports import held_port

FACTS = ModelFacts(
    family="gpt_neox", vocab_size=100, max_model_len=64, eos_ids=(0,), dtype="float32", device="cpu", num_blocks=8,
    block_tokens=4, num_parameters=1000, checkpoint_step=None, attention="kernel", linear="onednn", kernels="native",
    load_seconds=(("weights", 1.5),),
)  # fmt: skip

END_REASONS = (
    "length", "eos", "stop_string", "stop_id", "cancelled", "deadline", "slow_reader", "draining", "engine_down", "broke",
)  # fmt: skip
REJECTION_REASONS = ("requests", "tokens", "bytes", "loading", "draining", "engine_down")

NAMES = {
    "gpu_clock_hertz", "gpu_memory_bytes", "gpu_memory_used_bytes", "gpu_power_watts", "gpu_temperature_celsius",
    "gpu_utilization_ratio",
    "checkpoint_timestamp_seconds", "engine_failures", "queue_oldest_seconds", "rank_memory_bytes", "reloads",
    "request_decode_time_seconds", "request_generation_tokens", "request_prefill_time_seconds", "request_prompt_tokens",
    "request_time_per_output_token_seconds", "request_unstarted_queue_time_seconds", "server_state", "wasted_tokens",
    "watch_interval_seconds",
    "build_info", "e2e_request_latency_seconds", "engine_restarts", "engine_up", "event_loop_lag_seconds", "generation_tokens",
    "inter_token_latency_seconds", "kv_blocks", "kv_blocks_cached", "kv_blocks_used", "model_info", "model_load_seconds",
    "kv_usage_ratio", "nonfinite_requests", "num_requests_running", "num_requests_waiting",
    "preemptions", "steps_overtaken", "prefix_cache_hits", "prefix_cache_queries", "prompt_tokens",
    "audit_lines_lost",
    "tenant_generation_tokens", "tenant_prompt_tokens", "tenant_refusals", "tenant_requests", "tenant_requests_held",
    "tenant_requests_queued", "tenant_sequences_running",
    "token_reloads_refused", "certificate_reloads_refused", "certificate_expiry_timestamp_seconds",
    "weight_swap_seconds", "weight_swaps", "reloads_refused",
    "queued_prompt_tokens", "rank_heartbeat_age_seconds", "rank_up", "rejections", "request_finished",
    "speculative_accepted_tokens", "speculative_proposed_tokens",
    "request_queue_time_seconds", "requests", "requests_kept", "step_seconds", "step_tokens", "time_to_first_token_seconds",
}  # fmt: skip


def stats(**changed: object) -> EngineStats:
    values: dict[str, object] = dict.fromkeys(EngineStats.__slots__, 0) | {
        "last_step": None, "queued_since_seconds": None, "recomputed": Recomputed(), "tenants": ()
    }  # fmt: skip
    return EngineStats(**(values | changed))  # type: ignore[arg-type]


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(version="1.2.3", num_ranks=2, model_name="mine", clock=lambda: 100.0)


def value(metrics: Metrics, name: str, **labels: str) -> float:
    found = metrics.registry.get_sample_value(f"tessera_{name}", labels)
    assert found is not None, f"no series tessera_{name}{labels}"
    return found


def test_the_names_are_frozen(metrics: Metrics) -> None:
    names = {family.name for family in metrics.registry.collect()}
    assert {name.removeprefix("tessera_") for name in names if name.startswith("tessera_")} == NAMES
    assert "process_resident_memory_bytes" in names


def test_every_label_set_exists_from_the_start(metrics: Metrics) -> None:
    for method in (*METHODS, "_OTHER"):
        for code in CODES:
            assert value(metrics, "requests_total", method=method, code=code) == 0
    for reason in END_REASONS:
        assert value(metrics, "request_finished_total", reason=reason) == 0
    for reason in REJECTION_REASONS:
        assert value(metrics, "rejections_total", reason=reason) == 0
    for reason in ("preempted", "fair_share", "restarted", *END_REASONS[4:]):
        assert value(metrics, "wasted_tokens_total", reason=reason) == 0
    for reason in get_args(LossReason):
        assert value(metrics, "engine_failures_total", reason=reason) == 0
    for state in State:
        assert value(metrics, "server_state", state=state.value) == (state is State.LOADING)
    for result in ("weights", "ranks", "taken_back", "refused"):
        assert value(metrics, "reloads_total", result=result) == 0
    for rank in "01":
        for where in ("host", "device"):
            assert value(metrics, "rank_memory_bytes", rank=rank, where=where) == 0
        assert value(metrics, "rank_up", rank=rank) == 0
        assert value(metrics, "rank_heartbeat_age_seconds", rank=rank) == 0
    for phase in ("import", "build", "weights", "cache"):
        assert value(metrics, "model_load_seconds", phase=phase) == 0


def test_every_series_bears_the_name_of_the_model(metrics: Metrics) -> None:
    metrics.engine_started(stats(), FACTS, model="mine")
    lines = [line for line in metrics.exposition().splitlines() if not line.startswith("#")]
    assert len(lines) > 500
    assert [line for line in lines if 'model_name="mine"' not in line] == []
    endpoint = metrics.listen("127.0.0.1", 0)
    try:  # what asks for a few series alone gets those, named too
        with urllib.request.urlopen(f"{endpoint.url}?name[]=tessera_engine_up", timeout=120) as response:
            shown = [line for line in response.read().decode().splitlines() if not line.startswith("#")]
    finally:
        endpoint.close()
    assert shown == ['tessera_engine_up{model_name="mine"} 1.0']


def test_histograms_of_seconds_start_at_one_millisecond(metrics: Metrics) -> None:
    text = metrics.exposition()
    for name in sorted(NAMES):
        if f"# TYPE tessera_{name} histogram" in text and name.endswith("_seconds"):
            first = re.search(rf'tessera_{name}_bucket{{le="([^"]+)",', text)
            assert first is not None
            assert float(first[1]) == 0.001, name


def test_calls_are_counted_by_method_and_code(metrics: Metrics) -> None:
    metrics.request_ended("/serve.v1.Inference/Generate", "OK")
    metrics.request_ended("Generate", "OK")
    metrics.request_ended("/other.Service/Anything", "UNIMPLEMENTED")
    assert value(metrics, "requests_total", method="Generate", code="OK") == 2
    assert value(metrics, "requests_total", method="_OTHER", code="UNIMPLEMENTED") == 1


def test_rejections_are_about_room_and_service_only(metrics: Metrics) -> None:
    for error in (
        QueueFull("", reason="requests", retry_after_seconds=1),
        QueueFull("", reason="tokens", retry_after_seconds=1),
        QueueFull("", reason="bytes", retry_after_seconds=1),
        Loading(),
        Draining(),
        EngineDown(),
        InvalidRequest.of("a", "b"),
    ):
        metrics.rejected(error)
    counts = [value(metrics, "rejections_total", reason=r) for r in REJECTION_REASONS]
    assert counts == [1] * 6


def test_every_way_to_fail_has_its_name(metrics: Metrics) -> None:
    for error in (RequestAborted(), DeadlineExpired(), SlowReader(), Draining(), EngineDown(), RequestBroke(), ValueError()):
        metrics.failed(RequestFailed(request_id=ID, error=error, queue_seconds=0.5, computed_tokens=7), total_seconds=2.0)
    counts = [value(metrics, "request_finished_total", reason=r) for r in END_REASONS[4:]]
    assert counts == [1, 1, 1, 1, 1, 2]
    assert [value(metrics, "wasted_tokens_total", reason=r) for r in END_REASONS[4:]] == [7, 7, 7, 7, 7, 14]
    assert value(metrics, "request_unstarted_queue_time_seconds_count") == 0, "all had begun"


def test_totals_go_on_when_a_new_engine_begins_at_zero(metrics: Metrics) -> None:
    metrics.engine_started(stats(), FACTS, model="m")
    metrics.engine_advanced(
        stats(
            preemptions=3,
            steps_overtaken=2,
            prefix_cache_queries=10,
            prefix_cache_hits=4,
            kv_blocks_used=5,
            kv_blocks_total=8,
            proposed_tokens=6,
        )
    )
    assert value(metrics, "kv_usage_ratio") == 5 / 8
    metrics.engine_stopped()
    assert value(metrics, "kv_blocks_used") == value(metrics, "kv_usage_ratio") == 0
    assert value(metrics, "engine_up") == 0
    metrics.engine_started(stats(), FACTS, model="m")
    metrics.engine_advanced(
        stats(preemptions=2, steps_overtaken=1, prefix_cache_queries=1, proposed_tokens=3, accepted_tokens=2)
    )
    assert value(metrics, "preemptions_total") == 5
    assert value(metrics, "steps_overtaken_total") == 3
    assert value(metrics, "prefix_cache_queries_total") == 11
    assert value(metrics, "prefix_cache_hits_total") == 4
    assert value(metrics, "speculative_proposed_tokens_total") == 9
    assert value(metrics, "speculative_accepted_tokens_total") == 2
    assert value(metrics, "rank_up", rank="1") == 1


def test_a_step_is_observed_once(metrics: Metrics) -> None:
    metrics.engine_started(stats(), FACTS, model="m")
    after = stats(steps=1, last_step=StepStats(tokens=12, num_spans=2, seconds=0.004))
    metrics.engine_advanced(after)
    metrics.engine_advanced(after)  # a command was obeyed meanwhile, no step was made
    assert value(metrics, "step_tokens_count") == 1
    assert value(metrics, "step_tokens_sum") == 12
    assert value(metrics, "step_seconds_sum") == 0.004


def test_the_model_is_described_once_it_is_loaded(metrics: Metrics) -> None:
    metrics.engine_started(stats(), FACTS, model="m")
    assert value(metrics, "model_load_seconds", phase="weights") == 1.5
    labels = (
        'attention="kernel",checkpoint_step="",device="cpu",dtype="float32",family="gpt_neox",kernels="native",linear="onednn"'
    )
    assert f"tessera_model_info{{{labels}" in metrics.exposition()


def test_the_endpoint_answers_on_loopback_and_its_port_cannot_be_shared(metrics: Metrics) -> None:
    with held_port() as port:
        endpoint = metrics.listen("127.0.0.1", port)
        try:
            with urllib.request.urlopen(endpoint.url, timeout=120) as response:
                assert 'tessera_engine_up{model_name="mine"} 0.0' in response.read().decode()
            taken = f"rpc.metrics_port: cannot listen on 127.0.0.1:{port}: Address already in use"
            with pytest.raises(ConfigError, match=taken):
                metrics.listen("127.0.0.1", port)
        finally:
            endpoint.close()
        metrics.listen("127.0.0.1", port).close()  # closed means free again


def test_the_endpoint_compresses_and_knows_openmetrics(metrics: Metrics) -> None:
    served = metrics.listen("localhost", 0)
    try:
        asked = urllib.request.Request(
            served.url, headers={"Accept-Encoding": "gzip", "Accept": "application/openmetrics-text; version=1.0.0"}
        )
        with urllib.request.urlopen(asked, timeout=120) as response:
            assert response.headers["Content-Encoding"] == "gzip"
            assert response.headers["Content-Type"].startswith("application/openmetrics-text")
    finally:
        served.close()


def test_only_counters_are_named_like_counters(metrics: Metrics) -> None:
    """What ``promtool check metrics`` asks of names."""
    for family in metrics.registry.collect():
        for sample in family.samples:
            is_total = sample.name.endswith("_total")
            assert is_total == (family.type == "counter"), sample.name
        assert family.documentation, family.name


ID = RequestId("r")


def generation(num_sequences: int = 1) -> Generation:
    return Generation(
        request_id=ID,
        prompt_ids=(1, 2, 3),
        sampling=SamplingParams(),
        stopping=StoppingParams(max_new_tokens=8),
        num_sequences=num_sequences,
        arrival_seconds=10.0,
    )


def finish(index: int, completion_tokens: int, *, done: bool, reason: FinishReason = FinishReason.EOS) -> SequenceFinished:
    return SequenceFinished(
        request_id=ID, index=index, reason=reason, matched_stop=None, seed=0, request_done=done,
        usage=Usage(prompt_tokens=3, cached_tokens=0, completion_tokens=completion_tokens),
        timings=Timings(queue_seconds=0.5, first_token_seconds=1.0, total_seconds=2.0),
    )  # fmt: skip


def test_a_request_is_counted_as_its_usage_says(metrics: Metrics) -> None:
    times = iter([11.0, 11.5, 11.75])
    ledger = Ledger(metrics, lambda: next(times))
    ledger.accepted(generation(num_sequences=2))
    ledger.saw(PromptReady(request_id=ID, prompt_tokens=3, cached_tokens=0))
    for index, id_ in ((0, 7), (0, 8), (1, 9)):
        ledger.saw(TokensOut(request_id=ID, index=index, text="", token_ids=(id_,)))
    ledger.saw(finish(0, 3, done=False))  # the third is EOS: generated, not delivered
    ledger.saw(finish(1, 1, done=True, reason=FinishReason.STOP_STRING))
    assert value(metrics, "prompt_tokens_total") == 3
    assert value(metrics, "generation_tokens_total") == 4
    assert value(metrics, "time_to_first_token_seconds_sum") == 1.0
    assert value(metrics, "time_to_first_token_seconds_count") == 1
    assert value(metrics, "inter_token_latency_seconds_sum") == 0.5
    assert value(metrics, "inter_token_latency_seconds_count") == 1
    assert value(metrics, "request_finished_total", reason="stop_string") == 1
    assert value(metrics, "request_finished_total", reason="eos") == 0
    assert value(metrics, "request_queue_time_seconds_sum") == 0.5
    assert value(metrics, "e2e_request_latency_seconds_sum") == 2.0


def test_a_request_whose_only_token_is_eos_has_a_first_token(metrics: Metrics) -> None:
    ledger = Ledger(metrics, lambda: 11.0)
    ledger.accepted(generation())
    ledger.saw(finish(0, 1, done=True))
    assert value(metrics, "generation_tokens_total") == 1
    assert value(metrics, "time_to_first_token_seconds_sum") == 1.0


def test_a_request_that_generates_nothing_has_no_first_token(metrics: Metrics) -> None:
    ledger = Ledger(metrics, lambda: 11.0)
    ledger.accepted(generation())
    ledger.saw(finish(0, 0, done=True, reason=FinishReason.LENGTH))
    assert value(metrics, "time_to_first_token_seconds_count") == 0


def test_a_failed_request_is_counted_once_and_forgotten(metrics: Metrics) -> None:
    ledger = Ledger(metrics, lambda: 11.0)
    ledger.accepted(generation())
    failed = RequestFailed(request_id=ID, error=RequestAborted("gone"))
    ledger.saw(failed)
    ledger.saw(failed)
    assert value(metrics, "request_finished_total", reason="cancelled") == 1
    assert value(metrics, "request_unstarted_queue_time_seconds_sum") == 1.0
    assert value(metrics, "request_prompt_tokens_sum") == 3, "of all that were accepted, however they ended"
    assert value(metrics, "request_queue_time_seconds_count") == 0


def test_the_time_of_a_request_is_divided_at_its_first_token(metrics: Metrics) -> None:
    times = iter([11.0, 11.5])
    ledger = Ledger(metrics, lambda: next(times))
    ledger.accepted(generation())
    for id_ in (7, 8):
        ledger.saw(TokensOut(request_id=ID, index=0, text="", token_ids=(id_,)))
    ledger.saw(finish(0, 3, done=True))
    assert value(metrics, "request_prefill_time_seconds_sum") == 0.5
    assert value(metrics, "request_decode_time_seconds_sum") == 1.0
    assert value(metrics, "request_time_per_output_token_seconds_sum") == 0.5, "two gaps between three tokens"
    assert value(metrics, "request_generation_tokens_sum") == 3


def test_the_oldest_request_in_the_queue_ages_while_nothing_moves(metrics: Metrics) -> None:
    metrics.engine_started(stats(), FACTS, model="m")
    assert value(metrics, "queue_oldest_seconds") == 0
    metrics.engine_advanced(stats(queued_since_seconds=88.0))
    assert value(metrics, "queue_oldest_seconds") == 12.0, "by the clock of whoever looks"
    metrics.engine_stopped()
    assert value(metrics, "queue_oldest_seconds") == 0


def test_positions_that_are_computed_twice_are_counted_by_why(metrics: Metrics) -> None:
    metrics.engine_started(stats(), FACTS, model="m")
    metrics.engine_advanced(stats(recomputed=Recomputed(preempted=5, restarted=2)))
    metrics.engine_started(stats(), FACTS, model="m")
    metrics.engine_advanced(stats(recomputed=Recomputed(preempted=1)))
    assert value(metrics, "wasted_tokens_total", reason="preempted") == 6
    assert value(metrics, "wasted_tokens_total", reason="restarted") == 2


def test_the_memory_of_ranks_goes_with_them(metrics: Metrics) -> None:
    metrics.ranks.memory([(10, 20), (30, 40)])
    assert value(metrics, "rank_memory_bytes", rank="1", where="device") == 40
    metrics.engine_stopped()
    assert value(metrics, "rank_memory_bytes", rank="1", where="device") == 0


def test_what_is_served_has_an_age_and_the_server_a_state(metrics: Metrics) -> None:
    metrics.checkpoint_served(1.5e9)
    metrics.follows(30.0)
    metrics.server_entered("draining")
    assert value(metrics, "checkpoint_timestamp_seconds") == 1.5e9
    assert value(metrics, "watch_interval_seconds") == 30
    assert [value(metrics, "server_state", state=state.value) for state in State] == [0, 0, 1, 0, 0]
    metrics.checkpoint_served(None)
    metrics.follows(None)
    assert value(metrics, "checkpoint_timestamp_seconds") == value(metrics, "watch_interval_seconds") == 0
