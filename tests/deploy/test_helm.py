"""The Helm chart, rendered and linted by Helm itself: the objects of the Kustomize overlays, under the release's name."""

from __future__ import annotations

import json
import os
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy import helm_render
from tests.deploy.test_kubernetes import MOST_SECONDS, OTHERS_KINDS, TOOLS, program, rendered, run
from tests.repo.documents import REPOSITORY

CHART = REPOSITORY / "deploy/helm/tessera"
GPU = {
    "image": {"tag": "0.1.0-cuda"},
    "device": "cuda",
    "tensorParallelSize": 1,
    "kvCacheGib": 16,
    "resources": {
        "requests": {"cpu": "4", "memory": "32Gi", "nvidia.com/gpu": 1},
        "limits": {"memory": "32Gi", "nvidia.com/gpu": 1},
    },
    "strategy": {"type": "Recreate", "rollingUpdate": None},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
}
ALL = {"prometheus": True, "keda": {"enabled": True}}

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(600)]


def helm(values: dict[str, Any], name: str = "tessera", namespace: str = "tessera") -> subprocess.CompletedProcess[str]:
    """What Helm says of the chart with these values; skipped where Helm is missing."""
    python = TOOLS / "python"
    if not python.exists() or subprocess.run([python, "-c", "import helm_python"], capture_output=True).returncode:
        pytest.skip("not tried: Helm is missing (make deploy-tools installs helm-python-sdk, which carries it)")
    words = [python, helm_render.__file__, CHART, json.dumps(values), name, namespace]
    return subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=MOST_SECONDS, env={**os.environ})


def objects(values: dict[str, Any], name: str = "tessera", namespace: str = "tessera") -> dict[tuple[str, str], Any]:
    """The objects of a release, by kind and name."""
    done = helm(values, name, namespace)
    assert done.returncode == 0, done.stderr
    return by_name(each for each in yaml.safe_load_all(done.stdout) if each)


def by_name(documents: Any) -> dict[tuple[str, str], Any]:
    return {(each["kind"], each["metadata"]["name"]): each for each in documents if each["kind"] != "Namespace"}


@pytest.mark.parametrize(("overlay", "values"), [("cpu", {}), ("gpu", GPU)])
def test_a_release_called_as_the_base_is_the_overlay_object_by_object(overlay: str, values: dict[str, Any]) -> None:
    assert objects(values) == by_name(rendered(overlay))


def test_nothing_of_a_release_bears_the_name_of_another(tmp_path: Path) -> None:
    found = objects(ALL, name="mine", namespace="there")
    assert {kind for kind, _ in found} >= {
        "Deployment",
        "Service",
        "NetworkPolicy",
        "ScaledObject",
        "PodMonitor",
        "PrometheusRule",
    }
    assert all(name.split("-")[0] == "mine" and each["metadata"]["namespace"] == "there" for (_, name), each in found.items())
    spec = found["Deployment", "mine"]["spec"]
    assert "replicas" not in spec, "KEDA decides"
    labels = spec["template"]["metadata"]["labels"]
    assert labels == {"app.kubernetes.io/name": "mine"}
    assert spec["selector"]["matchLabels"] == labels
    assert all(found["Service", name]["spec"]["selector"] == labels for name in ("mine", "mine-pods"))
    selecting = (("NetworkPolicy", "podSelector"), ("PodDisruptionBudget", "selector"), ("PodMonitor", "selector"))
    assert all(found[kind, "mine"]["spec"][key] == {"matchLabels": labels} for kind, key in selecting)
    file = tmp_path / "release.yaml"
    file.write_text(yaml.safe_dump_all([each for (kind, _), each in found.items() if kind not in OTHERS_KINDS]))
    run(program("kubernetes-validate", "make deploy-tools"), "--strict", file)


def test_of_several_releases_one_brings_the_rules() -> None:
    first, second = objects(ALL, "mine"), objects({**ALL, "prometheusRules": False}, "yours")
    assert first.keys() & second.keys() == set()
    assert [kind for kind, _ in (*first, *second) if kind == "PrometheusRule"] == ["PrometheusRule"]
    assert ("PodMonitor", "yours") in second


def test_values_reach_the_server() -> None:
    digest = "sha256:" + "0" * 64
    values = {
        "image": {"digest": digest}, "drainSeconds": 120, "drainLeastSeconds": 7, "extraArgs": ["--log-format", "json"],
        "sharedMemory": "2Gi", "model": {"claim": "weights"}, "networkPolicy": False,
    }  # fmt: skip
    found = objects(values)
    assert {kind for kind, _ in found} == {"Deployment", "Service", "PodDisruptionBudget"}
    pod = found["Deployment", "tessera"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == f"tessera@{digest}"
    assert pod["containers"][0]["args"][-2:] == ["--log-format", "json"]
    assert pod["terminationGracePeriodSeconds"] >= 120 + 10
    given = dict(pairwise(pod["containers"][0]["args"]))
    assert (given["--drain-seconds"], given["--drain-least-seconds"]) == ("120", "7")
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == "weights"
    assert pod["volumes"][1]["emptyDir"]["sizeLimit"] == "2Gi"


@pytest.mark.parametrize(("values", "word"), [({"replica": 2}, "replica"), ({"device": "tpu"}, "device")])
def test_values_that_mean_nothing_are_refused_by_name(values: dict[str, Any], word: str) -> None:
    done = helm(values)
    assert done.returncode != 0
    assert word in done.stderr
