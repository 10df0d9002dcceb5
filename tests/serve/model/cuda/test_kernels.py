"""The Triton kernels of attention without a GPU: interpreted beside plain torch."""

from __future__ import annotations

import pytest
import torch

from serve.model.cuda.tiling import MOST_SPLITS, cut, programs_for, shape_of, splits_for
from tests.serve.model.cuda.cases import CASES, STEPS
from tests.serve.model.cuda.processes import told_by


@pytest.mark.parametrize("name", CASES)
def test_the_interpreted_kernels_compute_what_plain_torch_does(name: str) -> None:
    found = told_by("interpreted", TRITON_INTERPRET="1")[name]
    assert found["difference"] <= CASES[name].tolerance
    assert found["caches are equal"]


@pytest.mark.parametrize("name", STEPS)
def test_inputs_of_captured_steps_are_computed_anew_and_rows_without_a_sequence_are_nought(name: str) -> None:
    found = told_by("interpreted", TRITON_INTERPRET="1")["captured inputs"][name]
    assert found["difference"] <= STEPS[name].tolerance
    assert found["rows without a sequence are 0"]


def test_neighbours_change_no_bit_of_what_a_sequence_computes() -> None:
    assert told_by("interpreted", TRITON_INTERPRET="1")["differences beside neighbours"] == {"37": 0.0, "300": 0.0, "600": 0.0}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("group", [1, 3, 8, 20, 48, 71])
def test_the_heads_of_a_group_are_shared_out_over_programs_of_full_tiles(group: int, dtype: torch.dtype) -> None:
    short, long = (shape_of(dtype, 64, group, long=phase) for phase in (False, True))
    assert short.rows == 16
    assert short.heads == -(-group // -(-group // 16)), "as many as fit, in parts of about the same size"
    parts = -(-group // long.heads)
    assert long.tokens * group >= 7 / 8 * long.rows * parts


def test_positions_are_split_among_more_programs_where_a_model_has_fewer_heads() -> None:
    assert [splits_for(programs, 132) for programs in (1, 4, 8, 16, 32, 40, 64, 128, 512)] == [32, 32, 32, 16, 8, 4, 4, 2, 1]
    assert splits_for(1, 1000) == MOST_SPLITS


def test_splits_are_computed_by_fewer_programs_where_a_step_has_enough() -> None:
    """A GPT-NeoX of 6.9B on an H200 at 1, 8, 64 and 256 sequences of up to 4,096 positions, and of up to 32,768."""
    splits = splits_for(32, 132)
    assert [programs_for(splits, 32 * rows, 132, 4096) for rows in (1, 8, 32, 64, 256)] == [8, 8, 4, 2, 1]
    assert [programs_for(splits, 32 * rows, 132, 32768) for rows in (1, 8, 64, 256)] == [8, 8, 8, 8]
    assert programs_for(1, 4, 132, 100) == 1
    assert programs_for(32, 10**6, 132, 100) == 1


def test_every_token_is_in_one_tile() -> None:
    short, long = cut([0, 1, 5, 105, 107], [7, 3, 9, 1], 4, 32)
    assert short == [(7, 0, 1, 0), (3, 1, 4, 1), (1, 105, 2, 5)]
    assert long == [(9, 5, 32, 0), (9, 37, 32, 0), (9, 69, 32, 0), (9, 101, 4, 0)]
