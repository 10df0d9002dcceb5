"""A few mutated inputs of each kind, and that the fuzzer finds what is planted."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fuzz.__main__ import MOST_SECONDS, main, run
from tests.fuzz.mutate import mutated
from tests.fuzz.targets import TARGETS, Target

INPUTS = 60


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_mutated_is_read_or_refused(name: str, tmp_path: Path) -> None:
    target = TARGETS[name](tmp_path)
    for seed in target.seeds:
        assert target.read(seed) == "read", "what is mutated is good to begin with"
    ends, found = run(target, seed=5, most=INPUTS)
    assert found == []
    assert ends.total() == INPUTS
    assert ends["refused"] > INPUTS / 4


def broken(data: bytes) -> str:
    if b"\xff" in data:
        raise IndexError("planted")
    return "read"


def slow(data: bytes) -> str:
    begun = time.thread_time()
    while b"\xff" in data and time.thread_time() - begun <= 1.2 * MOST_SECONDS:
        pass
    return "read"


def hungry(data: bytes) -> str:
    held.append(bytearray(b"x" * (300 << 20)))
    return "read"


held: list[bytearray] = []


@pytest.mark.parametrize(("read", "words"), [(broken, "planted"), (slow, r"took 1\.\d s"), (hungry, r"grew by \d+ MiB")])
def test_what_is_planted_is_found_and_repeated(read: Callable[[bytes], str], words: str) -> None:
    target = Target([b"a seed of some length"], read)
    bytearray(b"x" * (500 << 20))  # what a process held before hides nothing
    try:
        _, found = run(target, seed=1, most=None if read is not hungry else 1)
        assert len(found) == 1
        assert re.search(words, found[0])
    finally:
        held.clear()


def test_an_input_depends_on_the_seed_and_its_number_alone() -> None:
    seeds = [bytes(range(64)), b"other"]
    for number in range(200):
        first, second = (mutated(seeds[0], seeds, random.Random(f"3/{number}")) for _ in range(2))
        assert first == second


def test_the_program_says_what_it_did(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tokens", "--seed", "9", "--only", "4"]) == 0
    assert '"target": "tokens", "seed": 9, "inputs": 1' in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["nothing"])
