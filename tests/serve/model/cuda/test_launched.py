"""What is launched is what was compiled: types, numbers that are fixed, warps, stages and registers, on ``meta``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from serve.model.attention import LayerCache, Rotary, ScoreRules, StepLayout
from serve.model.cuda import kernels, layers, linear, residuals
from serve.model.cuda.backend import TritonBackend
from serve.model.cuda.tiling import SHARE_POSITIONS
from tests.serve.model.cuda import compiled
from tests.serve.model.cuda.variants import NAMES, Variant, attention_variants

META: Final = torch.device("meta")
BLOCK_TOKENS: Final = 16
KV_HEADS: Final = 4
TYPES: Final = {
    torch.int32: "*i32", torch.int64: "*i64", torch.int8: "*i8", torch.uint8: "*u8", torch.float8_e4m3fn: "*fp8e4nv",
    **{dtype: f"*{name}" for dtype, name in NAMES.items()},
}  # fmt: skip
ARCHITECTURE: Final = 90
Launch = tuple[dict[str, str], dict[str, Any], dict[str, Any]]
"""Types of what is given by position, constants, and options of the compiler."""


class Noted:
    """Stands for a kernel, and notes how it is launched."""

    def __init__(self, kernel: Any) -> None:
        self.arg_names: list[str] = kernel.arg_names
        self.launches: list[Launch] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._launch

    def _launch(self, *given: Any, **named: Any) -> None:
        constants = {name: value for name, value in named.items() if name in self.arg_names}
        options = {name: value for name, value in named.items() if name not in self.arg_names}
        types = {name: _type_of(value) for name, value in zip(self.arg_names, given, strict=False)}
        assert types.keys() | constants.keys() == set(self.arg_names)
        self.launches.append((types, constants, options))


def _type_of(value: object) -> str:
    return TYPES[value.dtype] if isinstance(value, Tensor) else "fp32" if isinstance(value, float) else "i32"


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> dict[str, Noted]:
    """What stands for each kernel, by its name."""
    found = {}
    users = {"attend": kernels, "write_kv": kernels, "combine": kernels}
    for name, user in (users | {"quantized_linear": linear, "rms_norm": layers, "sum_and_norm": residuals}).items():
        found[name] = Noted(getattr(user, name))
        monkeypatch.setattr(user, name, found[name])
    return found


@pytest.fixture
def as_compiled(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Launch]:
    """What a function of ``compiled`` has the compiler asked for."""

    def asked(
        _: object, types: dict[str, str], constants: dict[str, Any], architecture: int, options: dict[str, Any]
    ) -> Launch:
        return types, constants, options

    monkeypatch.setattr(compiled, "_resources", asked)

    def ask(function: str, *words: Any, **named: Any) -> Launch:
        found: Launch = getattr(compiled, function)(ARCHITECTURE, *words, **named)
        return found

    return ask


def attend(of: Variant) -> None:
    """Launch one variant: a token of a long or a short sequence, or a prompt."""
    heads, tokens = KV_HEADS * of.group, 200 if of.phase == "prefill" else 1
    length = 4096 if of.phase == "decode" else 200
    blocks = -(-length // BLOCK_TOKENS)

    def made(*shape: int, dtype: torch.dtype = of.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    kept_in = torch.float8_e4m3fn if of.fp8 else of.dtype
    shape = (blocks, KV_HEADS, BLOCK_TOKENS, of.head_dim)
    cache = LayerCache(made(*shape, dtype=kept_in).transpose(2, 3), made(*shape, dtype=kept_in))
    layout = StepLayout(
        slots=made(tokens, dtype=torch.int64),
        positions=made(tokens, dtype=torch.int32),
        query_starts=(0, tokens),
        context_lengths=(length,),
        block_tables=made(1, blocks, dtype=torch.int32),
        table_rows=(0,),
    )
    rotary = None
    if of.angles != "none":
        told = of.head_dim // (1 if of.angles == "halves" else 2)
        angles = (made(tokens, told, dtype=torch.float32 if of.angles == "pairs" else of.dtype) for _ in range(2))
        rotary = Rotary(*angles, of.head_dim, of.angles == "pairs")
    rules = ScoreRules(
        softcap=30.0 if of.capped else 0.0,
        bias_HL=made(heads, blocks * BLOCK_TOKENS, dtype=torch.float32) if of.biased else None,
        sinks_H=made(heads, dtype=torch.float32) if of.sinks else None,
    )
    key_TGD = made(tokens, KV_HEADS, of.head_dim)
    TritonBackend(132, splits=8).attend(
        made(tokens, heads, of.head_dim), key_TGD, key_TGD, cache, layout,
        scale=0.125, window=256 if of.window else 0, rotary=rotary, rules=rules,
    )  # fmt: skip


def _without_what_is_not_read(launch: Launch, compiled_types: dict[str, str]) -> Launch:
    """Of tables and parts that a launch does not read, whatever lies there is named."""
    types, constants, options = launch
    unread = {"cosines", "sines"} if not constants.get("TURNED", 1) else set[str]()
    unread |= {name for name, rule in (("bias", "BIASED"), ("sinks", "SINKS")) if not constants.get(rule, True)}
    unread |= {"partial", "stats"} if constants.get("SPLITS") == 1 else set()
    kept = {name: compiled_types[name] if name in unread else of for name, of in types.items()}
    fixed = {name: value for name, value in constants.items() if name != "SHARE" or constants["SPLITS"] > 1}
    return kept, fixed, {name: value for name, value in options.items() if value is not None}


def same(found: Launch, expected: Launch) -> None:
    types = expected[0]
    assert _without_what_is_not_read(found, types) == _without_what_is_not_read(expected, types)


@pytest.mark.parametrize("name", attention_variants(ARCHITECTURE))
def test_attention_is_launched_as_it_was_compiled(
    name: str, noted: dict[str, Noted], as_compiled: Callable[..., Launch]
) -> None:
    of = attention_variants(ARCHITECTURE)[name]
    attend(of)
    (launched,) = noted["attend"].launches
    same(launched, as_compiled("attend", of))
    (written,) = noted["write_kv"].launches
    if of.angles in ("halves", "pairs"):
        expected = as_compiled("write_kv", of.dtype, of.head_dim, fp8=of.fp8, pairs=of.angles == "pairs")
        same(written, expected)
    assert len(noted["combine"].launches) == (of.phase == "decode")
    assert SHARE_POSITIONS < 4096
    for types, constants, options in noted["combine"].launches:
        *kinds, warps = as_compiled("combine", of.dtype, of.head_dim)
        assert options == warps
        fixed = kinds[1] | {"H": KV_HEADS * of.group, "SPLITS": 8, "SINKS": of.sinks}
        same((types, constants, options), (kinds[0], fixed, warps))


@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_layers_of_whole_numbers_are_launched_as_they_were_compiled(
    dtype: torch.dtype, bits: int, rows: int, noted: dict[str, Noted], as_compiled: Callable[..., Launch]
) -> None:
    pack = linear.whole_number_packer(f"int{bits}", 32)
    pack(torch.randn(64, 128).to(dtype), torch.randn(64).to(dtype), "gelu")(torch.randn(rows, 128).to(dtype))
    (launched,) = noted["quantized_linear"].launches
    types, constants, options = as_compiled("quantized_linear", dtype, bits, rows)
    same(launched, (types, constants | {"GROUP": launched[1]["GROUP"]}, options))  # one of all inputs, of 8 bits


@pytest.mark.parametrize("width", [128, 4096])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norms_are_launched_as_they_were_compiled(
    dtype: torch.dtype, width: int, noted: dict[str, Noted], as_compiled: Callable[..., Launch]
) -> None:
    norm = LlamaRMSNorm(width).to(dtype)
    layers.norm_by_one_launch(norm)
    norm(torch.randn(3, width).to(dtype))
    (launched,) = noted["rms_norm"].launches
    same(launched, as_compiled("rms_norm", dtype, width, "before weight"))


@pytest.mark.parametrize("width", [768, 6144])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_and_norms_are_launched_as_they_were_compiled(
    dtype: torch.dtype, width: int, noted: dict[str, Noted], as_compiled: Callable[..., Launch]
) -> None:
    norms = [residuals._Norm(nn.LayerNorm(width).to(dtype)) for _ in range(2)]
    residuals._sum([torch.randn(3, width).to(dtype) for _ in range(3)], norms)
    (launched,) = noted["sum_and_norm"].launches
    same(launched, as_compiled("sum_and_norm", dtype, width, "layer"))
