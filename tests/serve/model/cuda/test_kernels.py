"""The Triton kernels without a GPU: interpreted beside plain torch, and compiled for four architectures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from serve.model.cuda.tiling import MOST_SPLITS, cut, shape_of, splits_for
from tests.serve.model.cuda.cases import CASES

ROOT: Final = Path(__file__).resolve().parents[4]
TOLERANCE: Final = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""The interpreter cuts bf16 off where a GPU rounds: two units in the last place of numbers below 2."""
SHARED_BYTES: Final = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""What a program may have at most, by compute capability."""


def _told_by(module: str, *words: str, **environment: str) -> Any:
    command = [sys.executable, "-m", f"tests.serve.model.cuda.{module}", *words]
    ended = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"} | environment, capture_output=True, text=True, timeout=600
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@cache
def _interpreted() -> Any:
    return _told_by("interpreted", TRITON_INTERPRET="1")


@pytest.mark.parametrize("name", CASES)
def test_the_interpreted_kernels_compute_what_plain_torch_does(name: str) -> None:
    found = _interpreted()[name]
    assert found["difference"] <= TOLERANCE[CASES[name].dtype]
    assert found["caches are equal"]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", SHARED_BYTES)
def test_every_head_size_compiles_without_spilling_a_register(architecture: int, tmp_path: Path) -> None:
    found = _told_by("compiled", str(architecture), TRITON_CACHE_DIR=str(tmp_path))
    assert len(found) == 50
    assert {name: sizes for name, sizes in found.items() if sizes["stack"]} == {}
    assert {name: sizes for name, sizes in found.items() if sizes["shared"] > SHARED_BYTES[architecture]} == {}


def test_a_decoding_kernel_compiles(tmp_path: Path) -> None:
    found = _told_by("compiled", "90", "64", TRITON_CACHE_DIR=str(tmp_path))
    assert found["bf16, head size 64, decode"]["stack"] == 0


def test_a_tile_has_room_for_all_heads_of_a_group() -> None:
    for group in (1, 3, 8, 20, 71):
        for long in (False, True):
            shape = shape_of(torch.bfloat16, 64, group, long=long, rules=False)
            assert shape.rows >= group
            assert shape.rows.bit_count() == 1


def test_positions_are_split_while_there_are_too_few_tiles_for_the_device() -> None:
    assert [splits_for(tiles, 8, 132) for tiles in (1, 2, 4, 8, 16, 32, 33, 64, 512)] == [16, 16, 8, 4, 2, 1, 1, 1, 1]
    assert splits_for(1, 1, 1000) == MOST_SPLITS


def test_every_token_is_in_one_tile() -> None:
    short, long = cut([0, 1, 5, 105, 107], [7, 3, 9, 1], 4, 32)
    assert short == [(7, 0, 1), (3, 1, 4), (1, 105, 2)]
    assert long == [(9, 5, 32), (9, 37, 32), (9, 69, 32), (9, 101, 4)]
