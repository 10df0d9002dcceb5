"""What ``deploy/`` says is understood by the programs it is said to."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve.metrics import Metrics
from tests.repo.documents import REPOSITORY, help_of, options_in

DEPLOY = REPOSITORY / "deploy"
SERIES = re.compile(r"\btessera_(?!train_)[a-z0-9_]+")
"""Of serving; ``tests/finetune/observe/test_metrics.py`` looks after those of training."""
USERS = (
    "deploy/grafana/tessera.json", "deploy/prometheus/tessera.rules.yml", "docs/metrics.md", "docs/operations.md",
    "docs/runbook.md",
)  # fmt: skip


def exposed_names() -> tuple[set[str], set[str]]:
    """(names of metric families as documented, names of all series in the exposition)."""
    families, series = set(), set()
    for line in Metrics(version="test", num_ranks=1).exposition().splitlines():
        if line.startswith("# TYPE tessera_"):
            families.add(line.split()[2])
            series.add(line.split()[2])
        elif line.startswith("tessera_"):
            series.add(re.split(r"[{ ]", line, maxsplit=1)[0])
    # Present once a model is loaded; a histogram's other series once it exists.
    families.add("tessera_model_info")
    return families, series | families


@pytest.mark.parametrize(
    "path", [*USERS, *(str(p.relative_to(REPOSITORY)) for p in (REPOSITORY / "examples/demo").glob("*.py"))]
)
def test_series_that_are_named_exist(path: str) -> None:
    _, series = exposed_names()
    assert set(SERIES.findall((REPOSITORY / path).read_text())) <= series


def test_every_metric_is_documented() -> None:
    families, _ = exposed_names()
    documented = set(SERIES.findall((REPOSITORY / "docs/metrics.md").read_text()))
    assert families <= documented


@pytest.mark.parametrize("name", ["tessera.json", "training.json"])
def test_a_dashboard_has_queries_for_what_is_chosen_and_no_overlapping_panels(name: str) -> None:
    dashboard = json.loads((DEPLOY / "grafana" / name).read_text())
    panels = dashboard["panels"]
    assert [variable["name"] for variable in dashboard["templating"]["list"]] == ["datasource", "model", "instance"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    chosen = r'\btessera_\w+\{[^}]*model_name=~"\$model",instance=~"\$instance"\}'
    assert [expr for expr in expressions if len(re.findall(r"\btessera_\w+", expr)) != len(re.findall(chosen, expr))] == []
    cells = [cell for panel in panels for cell in cells_of(panel["gridPos"])]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


def cells_of(place: dict[str, int]) -> Iterator[tuple[int, int]]:
    return ((place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"]))


def test_alert_rules_have_a_query_and_a_sentence() -> None:
    groups = yaml.safe_load((DEPLOY / "prometheus/tessera.rules.yml").read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"] if "alert" in rule]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert SERIES.search(rule["expr"]) or re.search(r"\b(tessera:|tessera_train_)|job=\"tessera\"", rule["expr"])
        assert rule["annotations"]["summary"].endswith(".")
        assert rule["labels"]["severity"] in ("page", "ticket")


def documents_of(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def server_arguments() -> dict[str, list[str]]:
    """Arguments that each deployment gives to tessera-serve."""
    compose = documents_of(DEPLOY / "docker-compose.yaml")[0]["services"]["tessera"]["command"]
    (deployment,) = documents_of(DEPLOY / "kubernetes/base/deployment.yaml")
    kubernetes = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    unit = (DEPLOY / "systemd/tessera-serve.service").read_text()
    systemd = re.findall(r"^ExecStart=\S+/tessera-serve (.*)$", unit, re.MULTILINE)[0].split()
    command = json.loads(re.findall(r"^CMD (\[.*\])$", (REPOSITORY / "Dockerfile").read_text(), re.MULTILINE)[0])
    return {"docker-compose": compose, "kubernetes": kubernetes, "systemd": systemd, "Dockerfile": command}


@pytest.mark.parametrize("where", ["docker-compose", "kubernetes", "systemd", "Dockerfile"])
def test_deployments_use_options_that_exist(where: str) -> None:
    used = {word for word in server_arguments()[where] if word.startswith("--")}
    assert used <= options_in(help_of("serve"))


def test_the_pod_outlives_its_drain() -> None:
    (deployment,) = documents_of(DEPLOY / "kubernetes/base/deployment.yaml")
    pod = deployment["spec"]["template"]["spec"]
    given = dict(pairwise(pod["containers"][0]["args"]))
    assert pod["terminationGracePeriodSeconds"] >= float(given["--drain-seconds"]) + 10


def test_a_server_that_ends_stays_until_the_balancers_of_deploy_have_heard_of_it() -> None:
    """Of each balancer the interval of its checks, and how many must fail; the manifests give twice that."""
    (deployment,) = documents_of(DEPLOY / "kubernetes/base/deployment.yaml")
    least = float(dict(pairwise(deployment["spec"]["template"]["spec"]["containers"][0]["args"]))["--drain-least-seconds"])
    haproxy = re.search(r"check inter (\d+)ms fall (\d+)", (DEPLOY / "haproxy/haproxy.cfg").read_text())
    assert haproxy is not None
    (envoy,) = documents_of(DEPLOY / "envoy/envoy.yaml")
    (checks,) = {
        (check["interval"], check["unhealthy_threshold"])
        for cluster in envoy["static_resources"]["clusters"]
        for check in cluster["health_checks"]
    }
    needed = [int(haproxy[1]) / 1000 * int(haproxy[2]), float(checks[0].removesuffix("s")) * checks[1]]
    assert least >= 2 * max(needed)
    assert "rpc.drain_least_seconds: 2" in (DEPLOY / "systemd/tessera-serve.service").read_text()
    assert f"drainLeastSeconds: {least:g}" in (DEPLOY / "helm/tessera/values.yaml").read_text()


def test_prometheus_scrapes_the_port_that_is_served() -> None:
    scrape = documents_of(DEPLOY / "prometheus/prometheus.yml")[0]
    assert scrape["scrape_configs"][0]["static_configs"][0]["targets"] == ["tessera:9400"]
    assert (DEPLOY / "prometheus" / scrape["rule_files"][0]).exists()
