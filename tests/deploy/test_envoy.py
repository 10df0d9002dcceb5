"""Envoy's configuration, as far as it can be tried where no Envoy is: every field is one of Envoy's messages, of its type."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.deploy import envoy_check
from tests.deploy.test_kubernetes import TOOLS
from tests.deploy.tools import run
from tests.repo.documents import REPOSITORY

pytestmark = pytest.mark.deploy

FILE = REPOSITORY / "deploy/envoy/envoy.yaml"


def succeeds(command: Sequence[Path | str]) -> bool:
    return not subprocess.run(command, capture_output=True, timeout=120, check=False).returncode


def checked(file: Path) -> subprocess.CompletedProcess[str]:
    """What Envoy's messages say of a configuration; skipped where they are missing."""
    python = TOOLS / "python"
    there = python.exists() and not succeeds([python, "-c", "import envoy.config.bootstrap.v3"])
    if not there:
        pytest.skip("not tried: Envoy's messages are missing (make deploy-tools installs xds-protos, which has them)")
    return subprocess.run([python, envoy_check.__file__, file], capture_output=True, text=True, timeout=120, check=False)


def test_every_field_is_one_of_envoys_messages_and_calls_with_affinity_go_by_a_ring() -> None:
    done = checked(FILE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["same=2", "least=1"], "RING_HASH and LEAST_REQUEST"


def test_a_misspelt_field_is_found(tmp_path: Path) -> None:
    (tmp_path / "envoy.yaml").write_text(FILE.read_text().replace("hash_balance_factor", "hash_balance_factory"))
    assert "hash_balance_factory" in checked(tmp_path / "envoy.yaml").stderr


def test_both_clusters_have_the_servers_of_haproxys_configuration() -> None:
    haproxy = (REPOSITORY / "deploy/haproxy/haproxy.cfg").read_text()
    for number in (1, 2, 3):
        assert f"10.0.0.{number}:50051" in haproxy
        assert f"{{address: 10.0.0.{number}, port_value: 50051}}" in FILE.read_text()


@pytest.mark.skipif(shutil.which("envoy") is None, reason="not tried: envoy is missing, and Debian has no package of it")
def test_envoy_takes_its_configuration() -> None:
    run("envoy", "--mode", "validate", "-c", str(FILE), folder=REPOSITORY)
