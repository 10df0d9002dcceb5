"""Two ranks on two CUDA devices, each with its own: ``make test-gpu``. With fewer these tests are skipped, and say so."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pytest
import torch

from serve.worker.rank_process import rank_environment
from tests.gpu.deaths import FROZEN, KILLED, say_less, serve_and_strike
from tests.gpu.device import DEVICE, ON_DEVICE, REHEARSED, groups_products, reserved_bytes, some
from tests.gpu.test_cuda import says_what_transformers_does
from tests.serve.worker.test_family_parity import ROUTED
from tests.support import warm
from tests.support.models import save
from tests.support.server import ROOT, START_SECONDS, until
from tests.support.shared_memory import abandoned, in_shared_memory

RANKS: Final = 2
pytestmark = [
    *ON_DEVICE,
    pytest.mark.skipif(not REHEARSED and torch.cuda.device_count() < RANKS, reason="no two CUDA devices on this machine"),
]
CAPTURED: Final = {"gpt_neox": "on", "llama": "on", "mixtral": "off"}
"""Plain, grouped, and of experts, which are captured in bfloat16 alone: there no token is sure to be transformers'."""
WAYS: Final[Mapping[str, Mapping[str, str]]] = {
    "as the devices reach one another": {},
    "through the host's memory": {"NCCL_P2P_DISABLE": "1"},
}
EVEN: Final = {"mixtral": {"intermediate_size": 96}}
"""torch's product over groups of rows takes rows of whole 16 bytes alone, and a rank has half of each."""
WORKER: Final = "tests.serve.worker.graph_worker"
KILLS: Final = ((0, 1),) if REHEARSED else ((0, 1), (1, 0), (0, 1))
"""The ranks that are killed one after the other, of each of the servers side by side."""
FREEZES: Final = (1,) if REHEARSED else (1, 0)


@pytest.fixture(autouse=True)
def _room_for_ranks() -> None:
    """What the tests before took of the first device is given back: a rank shares it with this process."""
    reserved_bytes()


@pytest.mark.parametrize("way", some(WAYS, "through the host's memory"))
def test_a_server_of_two_ranks_says_what_transformers_does(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in WAYS[way].items():
        monkeypatch.setenv(name, value)
    families = some(CAPTURED, "llama")
    folders = [save(family, tmp_path / family, with_tokenizer=False) for family in families]

    def log_of(folder: Path) -> list[str]:
        options = ("--tensor-parallel-size", str(RANKS), "--cuda-graphs", CAPTURED[folder.name])
        return says_what_transformers_does(folder, *options)

    with ThreadPoolExecutor(len(folders)) as pool:
        logs = list(pool.map(log_of, folders))
    for family, log in zip(families, logs, strict=True):
        captured = sum("captured 3 decoding steps, of up to 4 rows" in line for line in log)
        assert captured == (RANKS if CAPTURED[family] == "on" else 0), log
        taken = {found[1] for line in log if (found := re.search(r"rank \d has cuda:\d .*(GPU-[0-9a-f-]+)", line))}
        assert len(taken) == (0 if REHEARSED else RANKS), log
        assert any("peer-to-peer" in line for line in log) is not REHEARSED, log


def _run_ranks(words: Sequence[str]) -> None:
    """Run the worker once for each rank, to the end of all; one that fails ends the others, which would wait for it."""
    programs: list[warm.Program | subprocess.Popen[str]] = []
    for rank in range(RANKS):
        given, environment = [str(rank), str(RANKS), *words], rank_environment(rank, RANKS, DEVICE)
        if REHEARSED:
            programs.append(warm.start(WORKER, given, environment))
        else:  # CUDA, once looked at, is of no use in a fork
            command, pipe = [sys.executable, "-m", WORKER, *given], subprocess.PIPE
            programs.append(subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=ROOT, env=environment))
    codes: list[int | None] = []

    def are_over() -> bool:
        codes[:] = [program.poll() for program in programs]
        return None not in codes or any(codes)

    try:
        until(are_over, seconds=START_SECONDS)
    finally:
        for program in programs:
            program.kill()
        said = [program.communicate() for program in programs]
    assert codes == [0] * RANKS, said


@pytest.mark.parametrize("families", some([("gpt_neox", "llama"), ("mixtral",)], ("mixtral",)), ids=" and ".join)
def test_replays_of_two_ranks_give_what_their_steps_give_bit_for_bit(families: tuple[str, ...], tmp_path: Path) -> None:
    """And what is drawn by them, and by steps launched one ahead. The sum of two numbers has one result, however it is made."""
    if not ROUTED.isdisjoint(families) and not groups_products():
        pytest.skip("this device computes experts one after the other: it takes compute capability 9 or 10")
    for family in families:
        save(family, tmp_path / family, with_tokenizer=False, **EVEN.get(family, {}))
    _run_ranks([str(tmp_path), DEVICE, "bfloat16"])
    first, second = (json.loads((tmp_path / f"graphs-{rank}.json").read_text()) for rank in range(RANKS))
    assert first == second
    assert set(first) == set(families)
    for told in first.values():
        assert told["sizes"] == [4, 2, 1]
        assert told["drawn"] == told["drawn eager"] != told["greedy"]
        for how in ("greedy", "drawn", "drawn without penalties"):
            assert told[f"{how} ahead"] == told[how]


def test_every_call_is_answered_once_and_whole_whichever_of_two_ranks_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    say_less(monkeypatch)
    folder, before = save("llama", tmp_path / "llama"), in_shared_memory()
    with ThreadPoolExecutor(len(KILLS)) as pool:
        served = list(
            pool.map(lambda number: serve_and_strike(folder, number, KILLS[number], KILLED, RANKS), range(len(KILLS)))
        )
    for survived, victims in zip(served, KILLS, strict=True):
        survived.prove(len(victims))
    assert [name for name in abandoned(before) if not name.startswith("cuda")] == [], "but for what CUDA's driver has there"


def test_a_frozen_rank_is_noticed_though_the_other_waits_for_it_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    say_less(monkeypatch)
    folder = save("llama", tmp_path / "llama")
    serve_and_strike(folder, 1, FREEZES, FROZEN, RANKS).prove(len(FREEZES))
