"""Prometheus series of a run: their names are a contract, and they say what happened."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from finetune.errors import ConfigError
from finetune.observe.metrics import TrainMetrics
from host.endpoint import MAX_CONNECTIONS

FROZEN = {
    "tessera_train_loss": "gauge",
    "tessera_train_eval_loss": "gauge",
    "tessera_train_learning_rate": "gauge",
    "tessera_train_grad_norm": "gauge",
    "tessera_train_tokens_per_second": "gauge",
    "tessera_train_model_flops_utilization": "gauge",
    "tessera_train_step": "gauge",
    "tessera_train_steps": "gauge",
    "tessera_train_memory_bytes": "gauge",
    "tessera_train_tokens_total": "counter",
    "tessera_train_skipped_steps_total": "counter",
    "tessera_train_loss_spikes_total": "counter",
    "tessera_train_saves_total": "counter",
    "tessera_train_last_save_timestamp_seconds": "gauge",
    "tessera_train_step_seconds": "histogram",
    "tessera_train_save_seconds": "histogram",
}


def scraped(metrics: TrainMetrics) -> str:
    endpoint = metrics.listen(0)
    try:
        with urllib.request.urlopen(endpoint.url, timeout=120) as answer:
            return re.sub(r'\{model_name=""\}|(?<=\{)model_name="",|,model_name=""(?=\})', "", answer.read().decode())
    finally:
        endpoint.close()


def test_names_are_frozen() -> None:
    found = re.findall(r"^# TYPE (\S+) (\S+)$", scraped(TrainMetrics()), re.MULTILINE)
    assert dict(found) == FROZEN


def test_every_series_bears_the_name_of_the_run() -> None:
    lines = [line for line in scraped(TrainMetrics(model_name="mine")).splitlines() if not line.startswith("#")]
    assert len(lines) > 20
    assert [line for line in lines if 'model_name="mine"' not in line] == []


def test_every_series_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
    assert {name for name in FROZEN if f"`{name}" not in page} == set()
    assert set(re.findall(r"`(tessera_train_[a-z_]+)", page)) <= set(FROZEN)


def test_steps_skips_and_saves_are_counted() -> None:
    metrics = TrainMetrics()
    metrics.began(step=10, steps=20)
    metrics.stepped(11, loss=2.5, rate=1e-3, grad_norm=0.7, tokens=100, seconds=0.2)
    metrics.stepped(12, loss=2.0, rate=1e-3, grad_norm=0.6, tokens=120, seconds=0.3)
    metrics.skipped(13, "gradient")
    metrics.saved(4.0)
    metrics.spiked()
    metrics.interval({"tokens_per_second": 400.0, "mfu": 0.5, "memory_bytes": 1 << 20})
    text = scraped(metrics)
    for line in (
        "tessera_train_loss 2.0",
        "tessera_train_tokens_total 220.0",
        "tessera_train_step 13.0",
        "tessera_train_steps 20.0",
        'tessera_train_skipped_steps_total{cause="gradient"} 1.0',
        'tessera_train_skipped_steps_total{cause="loss"} 0.0',
        "tessera_train_step_seconds_count 2.0",
        "tessera_train_save_seconds_sum 4.0",
        "tessera_train_loss_spikes_total 1.0",
        "tessera_train_model_flops_utilization 0.5",
        'tessera_train_memory_bytes{where="host"} 1.048576e+06',
    ):
        assert line in text.splitlines()


def test_what_was_not_measured_is_no_number() -> None:
    metrics = TrainMetrics()
    metrics.began(step=0, steps=10)
    unknown = {"loss", "eval_loss", "grad_norm", "model_flops_utilization"}
    lines = scraped(metrics).splitlines()
    assert {line for line in lines if line.endswith(" NaN")} == {f"tessera_train_{name} NaN" for name in unknown}
    metrics.stepped(1, loss=2.5, rate=1e-3, grad_norm=0.7, tokens=100, seconds=0.2)
    metrics.evaluated(2.25)
    lines = scraped(metrics).splitlines()
    assert "tessera_train_eval_loss 2.25" in lines
    assert [line for line in lines if line.endswith(" NaN")] == ["tessera_train_model_flops_utilization NaN"]


def test_half_open_connections_get_few_threads_and_do_not_stop_a_scrape() -> None:
    endpoint, before = TrainMetrics().listen(0), threading.active_count()
    host, _, port = endpoint.address.rpartition(":")
    with contextlib.ExitStack() as stack:
        try:
            for _ in range(100):
                stack.enter_context(socket.create_connection((host, int(port)), timeout=120))
            with urllib.request.urlopen(endpoint.url, timeout=120) as answer:
                assert b'tessera_train_step{model_name=""} 0.0' in answer.read()
            assert threading.active_count() <= before + MAX_CONNECTIONS
        finally:
            endpoint.close()


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"log.metrics_port is {port}"):
            TrainMetrics().listen(port)


def test_the_last_save_is_dated_from_the_beginning_on() -> None:
    metrics, before = TrainMetrics(), time.time()
    metrics.began(step=0, steps=10)
    began = metrics.registry.get_sample_value("tessera_train_last_save_timestamp_seconds")
    metrics.saved(1.0)
    saved = metrics.registry.get_sample_value("tessera_train_last_save_timestamp_seconds")
    assert began is not None
    assert saved is not None
    assert before - 1.0 <= began <= saved <= time.time() + 1.0
