"""Prometheus' configuration and rules, read by Prometheus' own tool, and the labels that it gives to servers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.test_helm import objects
from tests.deploy.test_kubernetes import rendered, the
from tests.deploy.tools import MOST_SECONDS, needs, run
from tests.repo.documents import REPOSITORY
from tests.support.server import until

FOLDER = REPOSITORY / "deploy/prometheus"
POD = "__meta_kubernetes_pod"

pytestmark = [pytest.mark.deploy, needs("promtool")]


def test_prometheus_reads_its_configuration_and_the_rules_it_names() -> None:
    said = run("promtool", "check", "config", "prometheus.yml", folder=FOLDER)
    assert "1 rule files found" in said
    assert "SUCCESS" in said


def jobs_that_rules_ask_for() -> set[str]:
    return set(re.findall(r'\bjob="([^"]*)"', (FOLDER / "tessera.rules.yml").read_text()))


def labels_of_a_pod(monitor: dict[str, Any], pod: dict[str, str], folder: Path) -> dict[str, str]:
    """The labels that Prometheus gives to what it scrapes of a pod, as its operator has it do by a PodMonitor."""
    about, (endpoint,) = monitor["metadata"], monitor["spec"]["podMetricsEndpoints"]
    namespace = about.get("namespace", "tessera")
    made = [
        {"source_labels": ["__meta_kubernetes_namespace"], "target_label": "namespace"},
        {"source_labels": [f"{POD}_name"], "target_label": "pod"},
        {"target_label": "job", "replacement": f"{namespace}/{about['name']}"},
        {"target_label": "endpoint", "replacement": endpoint["port"]},
    ]
    snake = {"sourceLabels": "source_labels", "targetLabel": "target_label"}
    ours = [{snake.get(key, key): value for key, value in each.items()} for each in endpoint.get("relabelings", [])]
    found = {f"{POD}_label_{re.sub(r'[^a-zA-Z0-9_]', '_', name)}": value for name, value in pod.items()}
    found |= {"__meta_kubernetes_namespace": namespace, f"{POD}_name": "a-pod"}
    config = {
        "job_name": "podMonitor",
        "static_configs": [{"targets": ["10.1.2.3:9400"], "labels": found}],
        "relabel_configs": made + ours,
    }
    file = folder / "prometheus.yml"
    file.write_text(yaml.safe_dump({"scrape_configs": [config]}))
    # It waits out its time whatever it has found.
    words = ("promtool", "check", "service-discovery", "--timeout=1s", str(file), "podMonitor")
    found_targets: list[dict[str, Any]] = []
    until(lambda: found_targets.extend(json.loads(run(*words, folder=folder)) or []) or found_targets, MOST_SECONDS)
    labels: dict[str, str] = found_targets[0]["labels"]
    return labels


def labels_of_pods(found: dict[tuple[str, str], Any], name: str, folder: Path) -> dict[str, str]:
    """Of the pods of a Deployment, under the PodMonitor beside it."""
    pod = found["Deployment", name]["spec"]["template"]["metadata"]["labels"]
    return labels_of_a_pod(found["PodMonitor", name], pod, folder)


def test_a_server_beside_prometheus_has_the_job_that_rules_ask_for() -> None:
    configured = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    assert {each["job_name"] for each in configured} == jobs_that_rules_ask_for()


def test_pods_of_an_overlay_have_the_job_that_rules_ask_for(tmp_path: Path) -> None:
    documents = rendered("nodes")
    found = {(kind, "tessera"): the(kind, documents) for kind in ("Deployment", "PodMonitor")}
    assert {labels_of_pods(found, "tessera", tmp_path)["job"]} == jobs_that_rules_ask_for()


def asked_by(scaled: dict[str, Any]) -> str:
    (trigger,) = scaled["spec"]["triggers"]
    query: str = trigger["metadata"]["query"]
    return query


def test_releases_in_one_namespace_scale_by_their_own_queues(tmp_path: Path) -> None:
    found = {name: objects({"prometheus": True, "keda": {"enabled": True}}, name, "there") for name in ("mine", "yours")}
    documents = rendered("nodes")
    found["tessera"] = {(each["kind"], each["metadata"]["name"]): each for each in documents}
    series, expected = [], []
    for waiting, (name, each) in enumerate(found.items(), 1):
        words = ",".join(f'{label}="{value}"' for label, value in labels_of_pods(each, name, tmp_path).items())
        series.append({"series": f'tessera_num_requests_waiting{{{words},model_name="m"}}', "values": f"{waiting}x5"})
        sample = {"labels": "{}", "value": waiting}
        expected.append({"expr": asked_by(each["ScaledObject", name]), "eval_time": "2m", "exp_samples": [sample]})
    file = tmp_path / "queues.yml"
    file.write_text(yaml.safe_dump({"tests": [{"interval": "1m", "input_series": series, "promql_expr_test": expected}]}))
    assert "SUCCESS" in run("promtool", "test", "rules", str(file), folder=tmp_path)


@pytest.mark.parametrize("name", ["tessera", "mine"])
def test_pods_of_a_release_have_the_job_that_rules_ask_for(name: str, tmp_path: Path) -> None:
    labels = labels_of_pods(objects({"prometheus": True}, name, "there"), name, tmp_path)
    assert {labels["job"]} == jobs_that_rules_ask_for()
    assert labels["namespace"] == "there"
