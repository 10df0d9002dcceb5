"""The Triton kernels compiled for five architectures: none spills a register, and each fits into shared memory.

Compiling all takes a quarter of an hour, so it is done when a kernel was changed (``make kernel-resources``) and what came of
it is kept. Here that record is held to the kernels as they are, and a few of them are compiled again.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.serve.model.cuda.processes import told_by
from tests.serve.model.cuda.resources import SHARED_BYTES, TENSOR_MEMORY_COLUMNS, decided_by, recorded
from tests.serve.model.cuda.variants import FP8_FROM, Variant, attention_variants

AGAIN = ("bf16, head size 256, prefill, groups of 4, all rules", "int4, bf16, 64 rows")
"""What takes most."""


def test_the_record_is_of_these_kernels_and_of_this_triton() -> None:
    assert recorded()["of"] == decided_by(), "compile them again: make kernel-resources"


def test_what_is_compiled_now_takes_what_the_record_says() -> None:
    record, found = recorded(), told_by("compiled", *AGAIN)
    for kind, name in zip(("attention", "linear"), AGAIN, strict=True):
        assert found[kind] == {str(each): {name: record[kind][str(each)][name]} for each in SHARED_BYTES}


@pytest.mark.parametrize("architecture", SHARED_BYTES)
def test_no_kernel_spills_a_register_and_each_fits_into_a_multiprocessor_s_memory(architecture: int) -> None:
    found = _recorded_for(architecture)
    assert {name: told for name, told in found.items() if told["stack"]} == {}
    assert {name: told for name, told in found.items() if told["shared"] > SHARED_BYTES[architecture]} == {}
    most = TENSOR_MEMORY_COLUMNS.get(architecture, 0)
    assert {name: told for name, told in found.items() if told["tensor_memory"] > most} == {}, "Triton refuses to launch it"
    assert all(0 < told["registers"] <= 255 for told in found.values())


@pytest.mark.parametrize("architecture", SHARED_BYTES)
def test_every_thread_loads_at_least_four_bytes_at_once(architecture: int) -> None:
    """Keys, values, weights and activations are read as vectors, and none of them number by number."""
    found = _recorded_for(architecture)
    narrow = {name for name, told in found.items() if told["narrow_loads"]}
    assert {name for name in narrow if "angles" not in name} == {
        name for name in found if name.startswith("write_kv, head size 8") and "angles" not in name
    }, "a head of eight has less than a vector for each thread"
    of_others = {each.name: each for each in attention_variants(architecture).values() if each.angles != "halves"}
    for name in narrow & of_others.keys():
        plain = Variant(of_others[name].dtype, of_others[name].head_dim, of_others[name].phase)
        assert found[plain.name]["narrow_loads"] == 0, "it is queries and angles alone, once for a program"


@pytest.mark.parametrize("architecture", SHARED_BYTES)
def test_many_rows_are_multiplied_by_groups_of_warps_where_a_device_has_such_products(architecture: int) -> None:
    """By ``wgmma`` on 9.0 and ``tcgen05.mma`` on 10.0, in 16 bits; decoding has too few rows, and other devices have none."""
    variants, has_them = attention_variants(architecture), architecture in (90, 100)
    found = {name for name, told in _recorded_for(architecture).items() if told["group_products"]}
    prompts = {name for name, of in variants.items() if of.phase == "prefill"}
    layers = {f"int{bits}, {dtype}, 64 rows" for bits in (8, 4) for dtype in ("bf16", "fp16")}
    assert found == (prompts | layers if has_them else set())


def test_the_page_says_how_many_variants_there_are() -> None:
    page = (Path(__file__).resolve().parents[4] / "docs" / "gpu.md").read_text(encoding="utf-8")
    record = recorded()
    told = re.search(
        r"(\d+) variants of attention, (\d+) more with an fp8 cache but for 8\.0, (\d+) of layers of whole numbers and "
        r"(\d+) of norms",
        page,
    )
    assert told is not None
    plain, with_fp8 = (len(record["attention"][architecture]) for architecture in ("80", "90"))
    assert [*map(int, told.groups())] == [plain, with_fp8 - plain, len(record["linear"]["90"]), len(record["norms"]["90"])]
    for architecture in SHARED_BYTES:
        assert f"{architecture // 10}.{architecture % 10}" in page


def _recorded_for(architecture: int) -> dict[str, dict[str, int]]:
    attention, linear, norms = (recorded()[kind][str(architecture)] for kind in ("attention", "linear", "norms"))
    others = {name for name in attention if name.startswith(("write_kv", "combine"))}
    assert attention.keys() - others == attention_variants(architecture).keys()
    assert len(others) == 2 * (3 + (architecture >= FP8_FROM))
    assert len(linear) == 2 * (2 * 2 + 1)
    assert len(norms) == 2 * (3 + 3)
    return {**attention, **linear, **norms}
