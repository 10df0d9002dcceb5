"""No alert fires in an hour of healthy load: what a real server said under it, over a minute and a quarter, replayed."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve.client import Client, TesseraError
from tests.deploy.replay import Record, Value, scraped
from tests.deploy.test_alerts import RULES, alerts
from tests.deploy.tools import needs, run
from tests.repo.documents import REPOSITORY
from tests.support.models import save
from tests.support.server import Server, serving

SCRAPES = 16
CALLERS = 6
HOUR_SECONDS = 3600.0
SLOW_TOKENS = 0.01
"""The objective of the rules: so many of all tokens may come later than a quarter of a second after the one before."""
WORDS = "def read(path): return open(path).read() # "

pytestmark = [pytest.mark.deploy, needs("promtool"), pytest.mark.timeout(600)]


def intervals() -> tuple[float, str]:
    """Seconds between two scrapes, and between two evaluations in Prometheus' words, as deploy/ has them."""
    config = yaml.safe_load((REPOSITORY / "deploy/prometheus/prometheus.yml").read_text())["global"]
    return float(config["scrape_interval"].removesuffix("s")), config["evaluation_interval"]


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """Made while callers ask as callers do."""
    model = save("gpt_neox", tmp_path_factory.mktemp("healthy") / "model")
    over = threading.Event()
    with serving(model, "--tensor-parallel-size", "2", "--kv-cache-gib", "0.02") as server:
        callers = [threading.Thread(target=_ask, args=(server, number, over)) for number in range(CALLERS)]
        try:
            for caller in callers:
                caller.start()
            every_seconds, _ = intervals()
            made = Record(every_seconds, began := time.time())
            for number in range(SCRAPES):
                over.wait(max(0.0, began + number * every_seconds - time.time()))
                made.add(scraped(server.metrics_url))
        finally:
            over.set()
            for caller in callers:
                caller.join()
    return made


def _ask(server: Server, number: int, over: threading.Event) -> None:
    """One caller: prompts that begin alike, answers of several lengths, some given up, now and then a mistake; then a pause."""
    turn = 0
    with Client(server.address) as client:
        while not over.is_set():
            turn += 1
            prompt = WORDS * (1 + (turn + number) % 4) + str(turn * CALLERS + number)
            with client.stream(prompt, max_new_tokens=8 + 24 * (turn % 3), temperature=0.8, seed=turn) as events:
                for seen, _ in enumerate(events):
                    if turn % 10 == 9 and seen == 4:
                        break
            if turn % 25 == 24:
                with contextlib.suppress(TesseraError):
                    client.generate(prompt, max_new_tokens=1 << 20)
            over.wait(0.2)


def said_of(record: Record, folder: Path, silent: list[str], code: int, changed: dict[str, Value]) -> str:
    """What promtool says of the hour in which none of these alerts may fire, in any minute."""
    every_seconds, evaluated = intervals()
    moments = [{"eval_time": f"{minute}m", "alertname": name, "exp_alerts": []} for name in silent for minute in range(1, 61)]
    group: dict[str, Any] = {
        "interval": f"{every_seconds:g}s",
        "input_series": record.replayed(HOUR_SECONDS, changed),
        "alert_rule_test": moments,
    }
    file = folder / "hour.yml"  # JSON, which is YAML too, and written in a moment
    file.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": evaluated, "tests": [group]}))
    return run("promtool", "test", "rules", str(file), folder=folder, expected_code=code)


def test_no_alert_fires_in_an_hour_of_it(record: Record, tmp_path: Path) -> None:
    assert record.grown("tessera_requests_total", 'code="OK"') > 50
    assert record.grown("tessera_requests_total", 'code="CANCELLED"') > 0
    assert record.grown("tessera_generation_tokens_total") > 1000
    count = record.grown("tessera_inter_token_latency_seconds_count")
    slow = 1.0 - record.grown("tessera_inter_token_latency_seconds_bucket", 'le="0.25"') / count
    silent = [name for name in alerts() if slow <= SLOW_TOKENS or not name.startswith("TesseraSlowTokens")]
    assert len(silent) > 20, "whether tokens are slow is for the machine to say, all else is not"
    assert "SUCCESS" in said_of(record, tmp_path, silent, 0, {})


def test_every_series_that_an_alert_looks_at_is_one_that_the_server_has(record: Record) -> None:
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    asked = {name for rule in rules for name in re.findall(r"\b(?:tessera|process)_[a-z0-9_]+", rule["expr"])}
    assert asked - record.names() == {"tessera_train_last_save_timestamp_seconds"}


@pytest.mark.parametrize(
    ("alert", "series", "value"),
    [
        ("TesseraDown", "tessera_engine_up", lambda value, scrape: 0.0 if 400 < scrape < 440 else value),
        ("TesseraStarving", "tessera_queue_oldest_seconds", lambda value, scrape: 61.0 if scrape > 600 else value),
        ("TesseraCacheFull", "tessera_kv_blocks_used", lambda value, scrape: 1e9),
        ("TesseraRanksRestarting", "tessera_engine_restarts_total", lambda value, scrape: float(scrape // 200)),
        ("TesseraErrors", "tessera_requests_total", None),
    ],
)
def test_it_fires_in_the_same_hour_where_one_series_is_not_well(
    record: Record, alert: str, series: str, value: Value | None, tmp_path: Path
) -> None:
    if value is None:  # calls that ended well, or were given up, are called faults
        record = Record(record.every_seconds, record.began, record.num_scrapes, dict(record.series))
        for name, labels in [key for key in record.series if key[0] == series]:
            record.series[name, re.sub('code="OK"', 'code="INTERNAL"', labels)] = record.series.pop((name, labels))
    said = said_of(record, tmp_path, [alert], 1, {} if value is None else {series: value})
    assert f"alertname:{alert}" in said.replace(" ", "")
