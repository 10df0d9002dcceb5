"""The rules of the launcher for Ray, without Ray."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from deploy.launchers.ray_actor import lacks
from deploy.launchers.ray_job import LaunchError, check_reach, exposed, parse
from deploy.launchers.ray_nodes import main
from tests.repo.documents import help_of, options_in

GIVEN = ["key", "--ray", "10.0.0.1:6379", "--nodes", "3"]
MODEL = ["--", "--model", "m"]


def refusal(*words: str) -> str:
    with pytest.raises(LaunchError) as refused:
        parse(words)
    assert refused.value.code == 2
    return str(refused.value)


def test_the_first_node_has_the_server_and_each_other_an_agent() -> None:
    job = parse([*GIVEN, "--agents-port", "7", *MODEL, "--", "x"])
    key = os.path.abspath("key")
    assert job.command(0, "10.0.0.1") == [
        *("tessera-serve", "--model", "m", "--", "x"),
        *("--nodes", "3", "--agents-listen", "10.0.0.1:7", "--agents-key-file", key),
    ]
    assert job.command(2, "fd00::1") == ["tessera-serve", "agent", "--join", "[fd00::1]:7", "--node", "2", "--key-file", key]
    assert {"--nodes", "--agents-listen", "--agents-key-file"} <= options_in(help_of("serve"))


@pytest.mark.parametrize("option", ["--nodes", "--agents-listen=a:1", "--agents-key-file"])
def test_options_that_the_launcher_gives_are_refused(option: str) -> None:
    name = option.partition("=")[0]
    assert refusal(*GIVEN, *MODEL, option, "2") == f"{name} is given to tessera-serve by this launcher; leave it out after --"


def test_numbers_and_options_that_mean_nothing_are_refused() -> None:
    assert refusal("key", "--ray", "auto", "--nodes", "1", *MODEL).startswith("--nodes is 1; it must be 2 or more")
    assert "one of them more than 0" in refusal(*GIVEN, "--cpus-per-node", "0", *MODEL)
    assert "one of them more than 0" in refusal(*GIVEN, "--gpus-per-node", "-1", *MODEL)
    assert refusal(*GIVEN) == "the options of tessera-serve are missing; they come after --"


@pytest.mark.parametrize("address", ["local", "ray://10.0.0.1:10001", "10.0.0.1"])
def test_a_ray_that_would_be_started_here_or_asked_from_afar_is_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = f"is {address!r}; it must be auto or HOST:PORT, a cluster of which this machine is a node"
    assert refusal("key", "--nodes", "2", "--ray", address, *MODEL) == f"--ray {rule}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert refusal("key", "--nodes", "2", "--ray", "auto", *MODEL) == f"RAY_ADDRESS {rule}"
    monkeypatch.delenv("RAY_ADDRESS")
    assert parse(["key", "--nodes", "2", "--ray", "auto", *MODEL]).ray == "auto"


def test_a_node_with_an_address_that_is_routed_globally_is_refused_unless_that_is_wanted() -> None:
    private = ["10.0.0.1", "192.168.1.1", "fe80::1%eth0", "fd00::1", "127.0.0.1", "100.64.0.1"]
    assert exposed("10.0.0.1", private) == []
    assert exposed("10.0.0.1", [*private, "8.8.8.8", "2600::1%eth1"]) == ["8.8.8.8", "2600::1%eth1"]
    assert exposed("127.0.0.1", ["8.8.8.8"]) == []  # where Ray listens on loopback alone
    assert exposed("127.0.0.2", ["8.8.8.8"]) == ["8.8.8.8"]  # and where it does not
    assert exposed("a.name", []) == ["a.name"]
    nodes = [("10.0.0.1", []), ("10.0.0.2", ["8.8.8.8"])]
    with pytest.raises(LaunchError, match=r"node 10\.0\.0\.2 .* \(8\.8\.8\.8\).*--insecure-public") as refused:
        check_reach(nodes, insecure_public=False)
    assert refused.value.code == 2
    check_reach(nodes, insecure_public=True)


def test_what_a_node_has_not_is_said(tmp_path: Path) -> None:
    key, programs = tmp_path / "key", tmp_path / "programs"
    assert lacks(str(key), str(programs)) == f"no key file {key}, which must be the same on every node"
    key.touch()
    assert lacks(str(key), str(programs)).startswith("no tessera-serve on the PATH")
    programs.mkdir()
    (programs / "tessera-serve").touch(0o755)
    assert lacks(str(key), str(programs)) == ""


def test_without_ray_it_is_said_what_brings_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main([*GIVEN, *MODEL]) == 1
    assert (
        capsys.readouterr().err == "ray_nodes: 'ray' is not installed; pip install ray, of the cluster's version, brings it\n"
    )
