"""Every query of the dashboards, asked of a real Prometheus while a small server and a run are under load."""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import grpc
import pytest

from finetune.observe.metrics import TrainMetrics
from serve.v1 import inference_pb2
from tests.deploy.prometheus import HELD, Prometheus, in_a_hurry, scraping
from tests.deploy.tools import needs
from tests.repo.documents import REPOSITORY
from tests.support.models import save
from tests.support.server import Server, serving, until

GRAFANA = REPOSITORY / "deploy/grafana"
RULES = REPOSITORY / "deploy/prometheus/tessera.rules.yml"
QUIET = re.compile(r"speculative|rejections_total|tessera_prefix_cache|tessera_gpu")
"""Of these there may be nothing to divide or to draw in so small a load, on a machine that may have no GPU."""

pytestmark = [pytest.mark.deploy, needs("prometheus"), pytest.mark.timeout(600)]


@dataclass(frozen=True)
class Watched:
    """Two servers and a run under a Prometheus."""

    prometheus: Prometheus
    servers: tuple[Server, Server]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("watched")
    model = save("gpt_neox", folder / "mine" / "checkpoints")
    rules = folder / "rules.yml"
    rules.write_text(in_a_hurry(RULES.read_text()))
    run = TrainMetrics(model_name="mine")
    run.began(step=0, steps=1000)
    endpoint = run.listen(0)
    over = threading.Event()
    try:
        with serving(model) as one, serving(model) as other:
            load = threading.Thread(target=_load, args=((one, other), run, over))
            load.start()
            targets = {
                "tessera": [server.metrics_url.split("/")[2] for server in (one, other)],
                "training": [endpoint.address],
            }
            try:
                with scraping(folder, targets, rules) as prometheus:
                    yield Watched(prometheus, (one, other))
            finally:
                over.set()
                load.join()
    finally:
        endpoint.close()


def _load(servers: tuple[Server, Server], run: TrainMetrics, over: threading.Event) -> None:
    """Requests that end, one that is given up now and then, and a run that makes steps."""
    step = 0
    while not over.is_set():
        step += 1
        for server in servers:
            request = inference_pb2.GenerateRequest(model="mine")
            request.token_ids.ids.extend([5, 6, 7 + step % 400] * 12)
            request.stopping.max_new_tokens = 12
            try:
                stream = server.inference.GenerateStream(request, timeout=60)
                for _ in stream:
                    if step % 4 == 0:
                        stream.cancel()
                        break
            except (grpc.RpcError, ValueError):
                continue  # it was stopped by a test
        run.stepped(step, loss=2.0, rate=1e-3, grad_norm=0.5, tokens=100, seconds=0.05)
        run.interval({"tokens_per_second": 900.0, "mfu": 0.4, "memory_bytes": 1 << 30})
        run.evaluated(2.1)
        over.wait(0.05)


def queries(name: str) -> list[str]:
    panels = json.loads((GRAFANA / name).read_text())["panels"]
    chosen = {"$model": "mine", "$instance": ".*", "$__rate_interval": "10s"}
    found = [target["expr"] for panel in panels for target in panel["targets"]]
    return [re.sub(r"\$\w+", lambda match: chosen[match[0]], expr) for expr in found]


@pytest.mark.parametrize("name", ["tessera.json", "training.json"])
def test_every_query_of_a_dashboard_has_an_answer(watched: Watched, name: str) -> None:
    asked = queries(name)
    assert len(asked) > 15

    def unanswered() -> list[str]:
        return [expr for expr in asked if not any(math.isfinite(value) for value in watched.prometheus.query(expr))]

    try:
        until(lambda: all(QUIET.search(expr) for expr in unanswered()), 60.0, every=1.0)
    except AssertionError:
        raise AssertionError(f"no answer: {[expr for expr in unanswered() if not QUIET.search(expr)]}") from None


def test_every_rule_is_evaluated_and_none_fires_under_load(watched: Watched) -> None:
    until(lambda: watched.prometheus.query("tessera:calls:rate5m"), 60.0)
    rules = [rule for group in watched.prometheus.get("/api/v1/rules")["groups"] for rule in group["rules"]]
    assert len(rules) > 30
    assert [(rule["name"], rule["lastError"]) for rule in rules if rule.get("lastError")] == []
    assert watched.prometheus.query("tessera:servers_up") == [2.0]
    # Whether tokens are slow is for the machine to say.
    assert {alert for alert, _ in watched.prometheus.firing() if "Slow" not in alert} == set()


def test_one_server_of_two_that_ends_is_told_of(watched: Watched) -> None:
    gone = watched.servers[1]
    address = gone.metrics_url.split("/")[2]
    until(lambda: watched.prometheus.query(HELD) == [2.0], 60.0)
    assert gone.stop() == 0
    until(lambda: ("TesseraServerGone", address) in watched.prometheus.firing(), 60.0, every=0.5)
    until(lambda: ("TesseraFewerServers", "") in watched.prometheus.firing(), 60.0, every=0.5)
    assert "TesseraDown" not in {alert for alert, _ in watched.prometheus.firing()}, "the other one goes on"
