"""The overlays for Kubernetes, rendered: what the schemas and checkov say of them, and what a server needs of each."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune.config.load import load_config
from serve.worker.agent import DEFAULT_PORT
from tests.repo.documents import REPOSITORY, help_of, options_in

KUBERNETES = REPOSITORY / "deploy/kubernetes"
TOOLS = REPOSITORY / ".cache/deploy-tools/bin"
"""Where ``make deploy-tools`` puts what pip has."""
SERVING = ("cpu", "gpu", "gpus", "nodes")
OVERLAYS = (*SERVING, "pool", "leader-worker", "train")
OTHERS_KINDS = ("HTTPRoute", "InferencePool", "JobSet", "LeaderWorkerSet", "PodMonitor", "PrometheusRule", "ScaledObject")
"""Of operators and gateways, for which there is no schema here."""
MOST_SECONDS = 300.0
BALANCERS_HEAR_SECONDS = 2.0
"""Twice what HAProxy and Envoy, as deploy/ has them, need to take out a server that says NOT_SERVING."""

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(600)]


def program(name: str, package: str) -> str:
    """The path of a program; the test is skipped where it is missing."""
    found = shutil.which(name, path=f"{TOOLS}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        pytest.skip(f"not tried: {name} is missing ({package})")
    return found


def run(*words: str | Path) -> str:
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=MOST_SECONDS)
    assert done.returncode == 0, f"{' '.join(map(str, words))}\n{done.stdout[-4000:]}{done.stderr[-2000:]}"
    return done.stdout


def rendered(overlay: str) -> list[dict[str, Any]]:
    kubectl = program("kubectl", "https://kubernetes.io/docs/tasks/tools; `kubectl kustomize` needs no cluster")
    return list(yaml.safe_load_all(run(kubectl, "kustomize", KUBERNETES / "overlays" / overlay)))


def the(kind: str, documents: list[dict[str, Any]]) -> dict[str, Any]:
    (found,) = (document for document in documents if document["kind"] == kind)
    return found


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_manifest_is_one_of_kubernetes_to_the_letter(overlay: str, tmp_path: Path) -> None:
    documents = with_what_operators_make(rendered(overlay))
    core = tmp_path / f"{overlay}.yaml"
    core.write_text(yaml.safe_dump_all([document for document in documents if document["kind"] not in OTHERS_KINDS]))
    run(program("kubernetes-validate", "make deploy-tools"), "--strict", core)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_checkov_finds_nothing_that_is_not_argued_beside_it(overlay: str, tmp_path: Path) -> None:
    checkov = program("checkov", "make deploy-tools")
    if os.geteuid() != 0:
        pytest.skip("not tried: checkov is run without a network, for which unshare needs root")
    file = tmp_path / f"{overlay}.yaml"
    documents = with_what_operators_make(rendered(overlay))
    file.write_text(yaml.safe_dump_all(documents))
    options = ("--framework", "kubernetes", "--skip-download", "--soft-fail", "--output", "json")
    checked = json.loads(run("unshare", "--net", checkov, "-f", file, *options))
    failed = [(check["check_id"], check["check_name"], check["resource"]) for check in checked["results"]["failed_checks"]]
    assert failed == []
    assert checked["summary"]["passed"] > 20


def with_what_operators_make(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The documents, and what operators make of theirs, which schemas and rules know."""
    made = [job_of(document) for document in documents if document["kind"] == "JobSet"]
    for document in documents:
        if document["kind"] == "LeaderWorkerSet":
            made += [deployment_of(document, role) for role in ("leader", "worker")]
    return [*documents, *made]


def deployment_of(group: dict[str, Any], role: str) -> dict[str, Any]:
    """The pods of one role of a LeaderWorkerSet, as a Deployment has pods."""
    template = group["spec"]["leaderWorkerTemplate"][f"{role}Template"]
    metadata = {**group["metadata"], "name": f"{group['metadata']['name']}-{role}"}
    spec = {"selector": {"matchLabels": template["metadata"]["labels"]}, "template": template}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec}


def job_of(job_set: dict[str, Any]) -> dict[str, Any]:
    """The Job that a JobSet makes."""
    (replicated,) = job_set["spec"]["replicatedJobs"]
    metadata = {**job_set["metadata"], "name": f"{job_set['metadata']['name']}-job"}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": replicated["template"]["spec"]}


@pytest.mark.parametrize("overlay", SERVING)
def test_a_pod_has_time_to_drain_and_says_what_it_takes(overlay: str) -> None:
    deployment = the("Deployment", rendered(overlay))
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    arguments = container["args"]
    given = dict(pairwise(arguments))
    assert {word for word in arguments if word.startswith("--")} <= options_in(help_of("serve"))
    wait = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    least = float(given["--drain-least-seconds"])
    assert least >= BALANCERS_HEAR_SECONDS
    assert pod["terminationGracePeriodSeconds"] >= wait + max(least, float(given["--drain-seconds"])) + 10
    memory = float(container["resources"]["limits"]["memory"].removesuffix("Gi"))
    ranks = int(given["--tensor-parallel-size"])
    assert container["resources"]["requests"]["memory"] == container["resources"]["limits"]["memory"]
    if given["--device"] == "cpu":
        assert float(given["--kv-cache-gib"]) * ranks < memory
        assert "nvidia.com/gpu" not in container["resources"]["limits"]
    else:
        assert container["resources"]["limits"]["nvidia.com/gpu"] == ranks
    volumes = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert {"/model", "/dev/shm", "/tmp"} == set(volumes)
    assert volumes["/model"]["readOnly"]
    assert container["image"].endswith(f"-{given['--device']}")


@pytest.mark.parametrize("overlay", SERVING)
def test_who_is_selected_is_the_server_and_who_may_call_is_not(overlay: str) -> None:
    documents = rendered(overlay)
    labels = the("Deployment", documents)["spec"]["template"]["metadata"]["labels"]
    policy = the("NetworkPolicy", documents)["spec"]
    services = [document for document in documents if document["kind"] == "Service"]
    budget = the("PodDisruptionBudget", documents)["spec"]
    selectors = [policy["podSelector"]["matchLabels"], budget["selector"]["matchLabels"]]
    selectors += [one["spec"]["selector"] for one in services]
    assert all(selector.items() <= labels.items() for selector in selectors)
    assert policy["ingress"][0]["from"] == [{"podSelector": {"matchLabels": {"tessera-client": "true"}}}]
    assert policy["egress"] == []
    assert [one["spec"].get("clusterIP") for one in services] == [None, "None"]
    ports = {port["name"] for port in the("Deployment", documents)["spec"]["template"]["spec"]["containers"][0]["ports"]}
    assert {port["port"] for rule in policy["ingress"] for port in rule["ports"]} == ports


def test_what_operators_are_told_names_what_is_there() -> None:
    documents = rendered("nodes")
    labels = the("Deployment", documents)["spec"]["template"]["metadata"]["labels"]
    monitor = the("PodMonitor", documents)["spec"]
    assert monitor["selector"]["matchLabels"].items() <= labels.items()
    assert monitor["podMetricsEndpoints"][0]["port"] == "metrics"
    assert "replicas" not in the("Deployment", documents)["spec"], "KEDA owns it"
    scaled = the("ScaledObject", documents)["spec"]
    assert scaled["scaleTargetRef"]["name"] == the("Deployment", documents)["metadata"]["name"]
    assert "tessera_num_requests_waiting" in scaled["triggers"][0]["metadata"]["query"]
    assert all(document["metadata"].get("namespace", "tessera") == "tessera" for document in documents)
    run(sys.executable, KUBERNETES / "components/prometheus/make_rule.py", "--check")


def test_the_job_that_trains_runs_a_file_that_is_accepted(tmp_path: Path) -> None:
    documents = rendered("train")
    job = job_of(the("JobSet", documents))["spec"]
    (container,) = job["template"]["spec"]["containers"]
    words = [*container["command"], *container["args"]]
    given = dict(pairwise(words))
    assert given["--nnodes"] == str(job["completions"]) == str(job["parallelism"])
    assert int(given["--nproc-per-node"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert words[words.index("-m") : words.index("tune") + 1] == ["-m", "finetune", "tune"]
    config_map = the("ConfigMap", documents)
    volume = next(volume for volume in job["template"]["spec"]["volumes"] if volume["name"] == "run")
    assert volume["configMap"]["name"] == config_map["metadata"]["name"]
    (tmp_path / "run.yaml").write_text(config_map["data"]["run.yaml"])
    config = load_config(tmp_path / "run.yaml")
    assert config.run.resume == "auto", "a job that starts again goes on"
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert config.run.output.startswith("/runs/")
    assert {"/runs", "/run/tessera", "/dev/shm", "/tmp"} == mounts


def test_a_group_of_leader_and_worker_is_one_server_and_its_agents() -> None:
    documents = rendered("leader-worker")
    assert not [document for document in documents if document["kind"] == "Deployment"]
    spec = the("LeaderWorkerSet", documents)["spec"]["leaderWorkerTemplate"]
    leader, worker = (spec[f"{role}Template"]["spec"] for role in ("leader", "worker"))
    (server,), (agent,) = leader["containers"], worker["containers"]
    given = dict(word.split("=", 1) for word in server["args"] if "=" in word)
    asked = dict(word.split("=", 1) for word in agent["args"][1:])
    assert {word.partition("=")[0] for word in server["args"]} <= options_in(help_of("serve"))
    assert agent["args"][0] == "agent"
    assert asked.keys() <= options_in(help_of("serve", "agent"))
    assert int(given["--nodes"]) == spec["size"]
    for container in (server, agent):
        gpus = container["resources"]["limits"]["nvidia.com/gpu"]
        assert gpus * spec["size"] == int(given["--tensor-parallel-size"])
    assert server["image"] == agent["image"]
    assert agent["volumeMounts"] == server["volumeMounts"], "checkpoint and key lie at the same paths"
    assert given["--agents-key-file"] == asked["--key-file"]
    port = {each["name"]: each["containerPort"] for each in server["ports"]}["agents"]
    assert port == DEFAULT_PORT, "where an agent that is told nothing joins"
    assert given["--agents-listen"] == f"$(POD_IP):{port}"
    assert float(given["--drain-least-seconds"]) >= BALANCERS_HEAR_SECONDS
    drains = server["lifecycle"]["preStop"]["sleep"]["seconds"] + float(given["--drain-seconds"])
    assert float(asked["--linger-seconds"]) > drains, "ranks are there for as long as streams are"
    assert min(leader["terminationGracePeriodSeconds"], worker["terminationGracePeriodSeconds"]) >= drains + 10
    budget, services = the("PodDisruptionBudget", documents)["spec"]["selector"], documents
    selectors = [each["spec"]["selector"] for each in services if each["kind"] == "Service"] + [budget["matchLabels"]]
    labels = [spec[f"{role}Template"]["metadata"]["labels"] for role in ("leader", "worker")]
    assert all(selector.items() <= labels[0].items() and not selector.items() <= labels[1].items() for selector in selectors)
    (policy,) = (each["spec"] for each in documents if each["metadata"]["name"] == "tessera-group")
    assert all(policy["podSelector"]["matchLabels"].items() <= each.items() for each in labels)
