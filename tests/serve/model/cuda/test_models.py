"""Whole models as a CUDA device computes them, and norms alone: the kernels interpreted beside plain torch."""

from __future__ import annotations

import pytest

from serve.model.families import FAMILIES
from tests.serve.model.cuda.processes import told_by
from tests.serve.worker.test_loader import VARIANTS

FEW = tuple(name for name in VARIANTS if name in FAMILIES)
MORE = tuple(name for name in VARIANTS if name not in FAMILIES)


@pytest.mark.parametrize("name", [*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_a_model_of_interpreted_kernels_computes_what_plain_torch_does(name: str) -> None:
    names = FEW if name in FEW else MORE
    assert told_by("interpreted_models", *names, TRITON_INTERPRET="1")[name] < 3e-6


def test_interpreted_norms_and_sums_are_those_of_transformers_and_torch() -> None:
    found = told_by("interpreted_norms", TRITON_INTERPRET="1")
    assert found.pop("another type")
    assert found.pop("kept for another")
    assert len(found) == 27 + 36
    assert {name: share for name, share in found.items() if share > 1.0} == {}
