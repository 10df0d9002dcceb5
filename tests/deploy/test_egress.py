"""A server in a network of its own that leads nowhere: it serves, and tries to reach nobody."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import grpc
import pytest

from serve.v1 import inference_pb2, inference_pb2_grpc
from tests.deploy.namespaces import require_namespaces
from tests.support.models import save
from tests.support.server import started, until

pytestmark = pytest.mark.deploy

_ALONE = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")

_SENDS = """
import contextlib, socket
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender, contextlib.suppress(OSError):
    sender.sendto(b"x", ("192.0.2.1", 9))
print(flush=True)
input()
"""


def _packets_without_a_way(pid: int) -> tuple[int, int]:
    """How many packets found no way out of a process's network, of each version of the protocol."""
    names, values = (line.split() for line in Path(f"/proc/{pid}/net/snmp").read_text().splitlines() if line.startswith("Ip: "))
    six = dict(line.split() for line in Path(f"/proc/{pid}/net/snmp6").read_text().splitlines())
    return int(dict(zip(names, values, strict=True))["OutNoRoutes"]), int(six["Ip6OutNoRoutes"])


def _answer(address: str) -> list[int]:
    request = inference_pb2.GenerateRequest(token_ids={"ids": [5, 6, 7]}, stopping={"max_new_tokens": 8, "ignore_eos": True})
    with grpc.insecure_channel(address) as channel:
        answer = inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=240, wait_for_ready=True)
    return list(answer.completions[0].token_ids)


def test_two_ranks_load_and_serve_without_a_network_and_send_nothing_there(tmp_path: Path) -> None:
    require_namespaces()
    model = save("gpt_neox", tmp_path / "model")
    with tempfile.TemporaryDirectory() as folder:  # a socket's path may not be long
        address = f"unix:{folder}/socket"
        with started(model, "--tensor-parallel-size", "2", "--host", address, under=_ALONE) as (process, log):
            assert process.stdout is not None
            assert process.stdout.readline().startswith("tessera ready "), "".join(log)
            assert len(_answer(address)) == 8
            assert _packets_without_a_way(process.pid) == (0, 0)
            process.terminate()
            until(lambda: process.poll() is not None)
            assert process.poll() == 0, "".join(log)


def test_a_packet_that_finds_no_way_is_counted() -> None:
    require_namespaces()
    with subprocess.Popen([*_ALONE, sys.executable, "-c", _SENDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert _packets_without_a_way(process.pid)[0] == 1
        process.communicate(b"\n")
