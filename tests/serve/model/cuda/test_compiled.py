"""The Triton kernels compiled for four architectures: none spills a register, and each fits into shared memory.

Compiling all takes minutes, so it is done when a kernel was changed (``make kernel-resources``) and what came of it is kept.
Here that record is held to the kernels as they are, and a few of them are compiled again.
"""

from __future__ import annotations

import pytest

from tests.serve.model.cuda.processes import told_by
from tests.serve.model.cuda.resources import HEAD_SIZES, SHARED_BYTES, decided_by, recorded

AGAIN = ("bf16, head size 256, prefill, rules", "int4, bf16, 64 rows")
"""What takes most."""


def test_the_record_is_of_these_kernels_and_of_this_triton() -> None:
    assert recorded()["of"] == decided_by(), "compile them again: make kernel-resources"


def test_what_is_compiled_now_takes_what_the_record_says() -> None:
    record, found = recorded(), told_by("compiled", *AGAIN)
    for kind, name in zip(("attention", "linear"), AGAIN, strict=True):
        assert found[kind] == {str(each): {name: record[kind][str(each)][name]} for each in SHARED_BYTES}


@pytest.mark.parametrize("architecture", SHARED_BYTES)
def test_no_kernel_spills_a_register_and_each_fits_into_shared_memory(architecture: int) -> None:
    found = _recorded_for(architecture)
    assert {name: told for name, told in found.items() if told["stack"]} == {}
    assert {name: told for name, told in found.items() if told["shared"] > SHARED_BYTES[architecture]} == {}
    assert all(0 < told["registers"] <= 255 for told in found.values())


@pytest.mark.parametrize("architecture", SHARED_BYTES)
def test_every_thread_loads_at_least_four_bytes_at_once(architecture: int) -> None:
    """Keys, values, weights and activations are read as vectors, and none of them number by number."""
    narrow = {name for name, told in _recorded_for(architecture).items() if told["narrow_loads"]}
    assert {name for name in narrow if "other angles" not in name} == {
        name for name in _recorded_for(architecture) if name.startswith("write_kv, head size 8") and "other" not in name
    }, "a head of eight has less than a vector for each thread"
    for name in narrow:
        if "other angles" in name and "head size 8," not in name:
            plain = _recorded_for(architecture)[name.removesuffix(", other angles")]
            assert plain["narrow_loads"] == 0, "it is queries and angles alone, once for a program"


def _recorded_for(architecture: int) -> dict[str, dict[str, int]]:
    attention, linear, norms = (recorded()[kind][str(architecture)] for kind in ("attention", "linear", "norms"))
    with_fp8 = len(HEAD_SIZES) * 2 + 2 if architecture >= 90 else 0
    assert len(attention) == len(HEAD_SIZES) * (4 + 2) + 2 * 2 + 2 * 3 + 2 * 4 + with_fp8
    assert len(linear) == 2 * (2 * 2 + 1)
    assert len(norms) == 2 * (3 + 3)
    return {**attention, **linear, **norms}
