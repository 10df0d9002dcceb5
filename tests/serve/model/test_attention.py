"""Both attention back ends against attention written out from its definition."""

from __future__ import annotations

import copy
import math
import random
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb

from serve.errors import ConfigError
from serve.model.attach import INTERFACE_NAME, register_interface
from serve.model.attention import Backend, LayerCache, Rotary, ScoreRules, StepLayout, TorchBackend
from serve.model.kernel_attention import CpuKernelBackend
from serve.worker.kv_cache import allocate
from tests.support.kernels import LEVELS, WIDE, cpu_kernels, kernels_of

EVERY_LEVEL = (*LEVELS, pytest.param(WIDE, marks=pytest.mark.slow))


@pytest.fixture(params=["torch", *EVERY_LEVEL])
def backend(request: pytest.FixtureRequest) -> Backend:
    if request.param == "torch":
        return TorchBackend()
    return CpuKernelBackend(kernels_of(request.param))


class _Sequence:
    """A sequence with all of its queries, keys and values, of which a prefix is in the cache already."""

    def __init__(self, length: int, new: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        self.length, self.new = length, new
        self.query = torch.randn(length, heads, head_dim).to(dtype)
        self.key = torch.randn(length, kv_heads, head_dim).to(dtype)
        self.value = torch.randn(length, kv_heads, head_dim).to(dtype)
        self.blocks: list[int] = []

    def part(self, begin: int, end: int) -> _Sequence:
        """The sequence as it is when the positions from ``begin`` to ``end`` are computed."""
        part = copy.copy(self)
        part.length, part.new = end, end - begin
        part.query, part.key, part.value = self.query[:end], self.key[:end], self.value[:end]
        return part

    def expected(self, scale: float, window: int, rules: ScoreRules | None = None) -> Tensor:
        """Outputs of the last ``new`` positions, from the definition, in float64."""
        group = self.query.shape[1] // self.key.shape[1]
        key = self.key.double().repeat_interleave(group, dim=1)
        value = self.value.double().repeat_interleave(group, dim=1)
        out = []
        for position in range(self.length - self.new, self.length):
            first = max(0, position - window + 1) if window else 0
            scores = torch.einsum("hd,khd->hk", self.query[position].double(), key[first : position + 1]) * scale
            if rules is not None:
                assert rules.bias_HL is not None
                assert rules.sinks_H is not None
                scores = (scores / rules.softcap).tanh() * rules.softcap if rules.softcap else scores
                scores = scores + rules.bias_HL[:, first : position + 1].double()
                mass = scores.exp().sum(dim=1, keepdim=True) + rules.sinks_H.double().exp()[:, None]
                out.append(torch.einsum("hk,khd->hd", scores.exp() / mass, value[first : position + 1]))
                continue
            out.append(torch.einsum("hk,khd->hd", scores.softmax(dim=1), value[first : position + 1]))
        return torch.stack(out)


def _lay_out(sequences: list[_Sequence], block_tokens: int, num_blocks: int) -> StepLayout:
    free = list(range(num_blocks))
    random.shuffle(free)
    slots, positions, starts = [], [], [0]
    for sequence in sequences:
        sequence.blocks = [free.pop() for _ in range(-(-sequence.length // block_tokens))]
        new = range(sequence.length - sequence.new, sequence.length)
        slots += [sequence.blocks[p // block_tokens] * block_tokens + p % block_tokens for p in new]
        positions += list(new)
        starts.append(starts[-1] + sequence.new)
    width = max(len(s.blocks) for s in sequences)
    return StepLayout(
        slots=torch.tensor(slots),
        positions=torch.tensor(positions, dtype=torch.int32),
        query_starts=tuple(starts),
        context_lengths=tuple(s.length for s in sequences),
        # Rows lie anywhere in the table, other sequences' between them.
        block_tables=torch.tensor(
            [[99] * width, *reversed([s.blocks + [99] * (width - len(s.blocks)) for s in sequences])], dtype=torch.int32
        ),
        table_rows=tuple(range(len(sequences), 0, -1)),
    )


def _poison(cache: LayerCache) -> None:
    """What a freed block may hold: values that would show in any sum they enter."""
    scales = [part for part in (cache.key_scales, cache.value_scales) if part is not None]
    for part in scales or (cache.keys, cache.values):
        part.fill_(math.nan)


def _fill_history(sequence: _Sequence, cache: LayerCache, block_tokens: int) -> None:
    old = torch.arange(sequence.length - sequence.new)
    block = torch.tensor(sequence.blocks)[old // block_tokens]
    cache.write(block, old % block_tokens, sequence.key[: len(old)], sequence.value[: len(old)])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_tokens"),
    [(4, 4, 16, 16), (8, 2, 64, 16), (6, 6, 64, 16), (4, 1, 20, 8), (3, 3, 96, 16), (32, 1, 32, 16)],
)
@pytest.mark.parametrize("window", [0, 1, 3, 21])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_over_blocks_is_attention(
    backend: Backend, heads: int, kv_heads: int, head_dim: int, block_tokens: int, window: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(heads * head_dim)
    random.seed(3)
    shape = (heads, kv_heads, head_dim, dtype)
    sequences = [_Sequence(*lengths, *shape) for lengths in [(1, 1), (16, 16), (17, 1), (70, 33), (100, 1), (48, 48), (33, 2)]]
    num_blocks = 80
    [cache] = allocate(
        layers=1,
        num_blocks=num_blocks,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_tokens=block_tokens,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    _poison(cache)
    layout = _lay_out(sequences, block_tokens, num_blocks)
    for sequence in sequences:
        _fill_history(sequence, cache, block_tokens)
    new = [torch.cat([getattr(s, name)[s.length - s.new :] for s in sequences]) for name in ("query", "key", "value")]
    scale = head_dim**-0.5

    out = backend.attend(*new, cache, layout, scale=scale, window=window)

    expected = torch.cat([s.expected(scale, window) for s in sequences])
    tolerance = 3e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block_tokens"), [(8, 2, 64, 16), (4, 1, 20, 8)])
@pytest.mark.parametrize("window", [0, 21])
@pytest.mark.parametrize("softcap", [0.0, 2.5])
def test_caps_sinks_and_biases_do_to_scores_what_they_say(
    backend: Backend, heads: int, kv_heads: int, head_dim: int, block_tokens: int, window: int, softcap: float
) -> None:
    torch.manual_seed(heads)
    random.seed(4)
    sequences = [_Sequence(*lengths, heads, kv_heads, head_dim, torch.float32) for lengths in [(1, 1), (70, 33), (40, 1)]]
    [cache] = allocate(
        layers=1,
        num_blocks=24,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_tokens=block_tokens,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    _poison(cache)
    layout = _lay_out(sequences, block_tokens, 24)
    for sequence in sequences:
        _fill_history(sequence, cache, block_tokens)
    new = [torch.cat([getattr(s, name)[s.length - s.new :] for s in sequences]) for name in ("query", "key", "value")]
    rules = ScoreRules(softcap=softcap, sinks_H=torch.randn(heads), bias_HL=torch.randn(heads, 80))

    out = backend.attend(*new, cache, layout, scale=head_dim**-0.5, window=window, rules=rules)

    expected = torch.cat([s.expected(head_dim**-0.5, window, rules) for s in sequences])
    torch.testing.assert_close(out.double(), expected, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (64, 16), (96, 24), (64, 20), (20, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_turns_queries_and_keys_as_transformers_does(head_dim: int, rotary_dim: int, dtype: torch.dtype) -> None:
    kernel = CpuKernelBackend(cpu_kernels())
    torch.manual_seed(head_dim + rotary_dim)
    random.seed(1)
    sequences = [_Sequence(*lengths, 6, 3, head_dim, dtype) for lengths in [(40, 40), (9, 9), (1, 1)]]
    size = {"layers": 1, "num_blocks": 8, "kv_heads": 3, "head_dim": head_dim, "block_tokens": 16, "dtype": dtype}
    [plain], [turned] = (allocate(**size, device=torch.device("cpu")) for _ in range(2))  # type: ignore[arg-type]
    layout = _lay_out(sequences, 16, 8)
    query, key, value = (torch.cat([getattr(s, name) for s in sequences]) for name in ("query", "key", "value"))
    angles = torch.outer(layout.positions.float(), 0.7 ** torch.arange(rotary_dim // 2)).repeat(1, 2)
    cosines, sines = angles.cos().to(dtype), angles.sin().to(dtype)
    query_turned, key_turned = (
        part[0].transpose(0, 1)
        for part in apply_rotary_pos_emb(
            query.transpose(0, 1)[None].double(),
            key.transpose(0, 1)[None].double(),
            cosines[None].double(),
            sines[None].double(),
        )
    )

    expected = TorchBackend().attend(query_turned.to(dtype), key_turned.to(dtype), value, plain, layout, scale=0.3, window=0)
    out = kernel.attend(query, key, value, turned, layout, scale=0.3, window=0, rotary=Rotary(cosines, sines, rotary_dim))

    tolerance = 3e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(turned.keys, plain.keys, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(turned.values, plain.values, rtol=0, atol=0)
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("level", EVERY_LEVEL)
def test_a_key_is_stored_with_the_same_bits_alone_and_in_a_whole_block(level: str) -> None:
    torch.manual_seed(2)
    kernel, layouts = CpuKernelBackend(kernels_of(level)), list[StepLayout]()
    whole = _Sequence(32, 32, 2, 2, 64, torch.bfloat16)
    whole.key[::3, :, ::5] = 1e-39
    whole.key[5, 0, 3] = math.nan
    angles = torch.outer(torch.arange(32).float(), 0.7 ** torch.arange(10)).repeat(1, 2)
    stored = list[Tensor]()
    for borders in ((0, 32), (0, 7, 16, 17, 32)):
        [cache] = allocate(
            layers=1, num_blocks=2, kv_heads=2, head_dim=64, block_tokens=16, dtype=torch.bfloat16, device=torch.device("cpu")
        )
        for begin, end in pairwise(borders):
            part = whole.part(begin, end)
            random.seed(0)
            layouts.append(_lay_out([part], 16, 2))
            new = (part.query[begin:], part.key[begin:], part.value[begin:])
            turning = Rotary(angles[begin:end].cos().bfloat16(), angles[begin:end].sin().bfloat16(), 20)
            kernel.attend(*new, cache, layouts[-1], scale=0.1, window=0, rotary=turning)
        stored.append(cache.keys[layouts[-1].block_tables[1].long()].view(torch.int16))
    assert torch.equal(*stored)


@pytest.mark.parametrize("window", [0, 1, 3, 20, 21])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", LEVELS)
def test_what_a_token_does_not_see_does_not_touch_it(window: int, dtype: torch.dtype, level: str) -> None:
    torch.manual_seed(window)
    random.seed(5)
    kernel, sequence = CpuKernelBackend(kernels_of(level)), _Sequence(100, 100, 4, 2, 64, dtype)
    layout, at = _lay_out([sequence], 16, 8), torch.arange(100)
    [cache] = allocate(
        layers=1, num_blocks=8, kv_heads=2, head_dim=64, block_tokens=16, dtype=dtype, device=torch.device("cpu")
    )
    clean = kernel.attend(sequence.query, sequence.key, sequence.value, cache, layout, scale=0.1, window=window)
    for place in range(100):
        key, value = sequence.key.clone(), sequence.value.clone()
        key[place], value[place] = math.nan, math.nan
        out = kernel.attend(sequence.query, key, value, cache, layout, scale=0.1, window=window)
        sees = (at >= place) & (at < place + window if window else True)
        assert torch.equal(out[~sees], clean[~sees]), f"of position {place}"
        assert out[sees].isnan().all()


@pytest.mark.parametrize("level", LEVELS)
def test_weights_in_bf16_are_rounded_to_the_nearest(level: str) -> None:
    torch.manual_seed(1)
    random.seed(6)
    sequence = _Sequence(256, 256, 4, 4, 64, torch.bfloat16)
    sequence.value.fill_(1.0)
    [cache] = allocate(
        layers=1, num_blocks=16, kv_heads=4, head_dim=64, block_tokens=16, dtype=torch.bfloat16, device=torch.device("cpu")
    )
    layout = _lay_out([sequence], 16, 16)
    new = (sequence.query, sequence.key, sequence.value)
    out = CpuKernelBackend(kernels_of(level)).attend(*new, cache, layout, scale=0.05, window=0)
    assert (out[128:] == 1.0).all(), "their errors, as often up as down, are no more than those of one weight together"


def test_strided_inputs_are_read_where_they_lie(backend: Backend) -> None:
    torch.manual_seed(0)
    random.seed(0)
    heads, head_dim = 4, 32
    sequence = _Sequence(20, 20, heads, heads, head_dim, torch.float32)
    [cache] = allocate(
        layers=1,
        num_blocks=4,
        kv_heads=heads,
        head_dim=head_dim,
        block_tokens=16,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    layout = _lay_out([sequence], 16, 4)
    # As GPT-NeoX hands them over: chunks of one fused [T, H, 3 * D] tensor, heads before tokens.
    fused = torch.cat([sequence.query, sequence.key, sequence.value], dim=2).transpose(0, 1)
    query, key, value = (part.transpose(0, 1) for part in fused.chunk(3, dim=-1))

    out = backend.attend(query, key, value, cache, layout, scale=0.2, window=0)

    torch.testing.assert_close(out.double(), sequence.expected(0.2, 0), rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block_tokens"), [(4, 4, 64, 16), (8, 2, 32, 16), (4, 1, 20, 8)])
@pytest.mark.parametrize("window", [0, 90])
@pytest.mark.parametrize("ruled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", EVERY_LEVEL)
def test_a_token_has_the_same_bits_alone_in_a_chunk_and_beside_others(
    heads: int, kv_heads: int, head_dim: int, block_tokens: int, window: int, ruled: bool, dtype: torch.dtype, level: str
) -> None:
    torch.manual_seed(head_dim)
    random.seed(7)
    kernel = CpuKernelBackend(kernels_of(level))
    rules = ScoreRules(softcap=2.5, sinks_H=torch.randn(heads), bias_HL=torch.randn(heads, 208)) if ruled else ScoreRules()
    sequences = [_Sequence(length, length, heads, kv_heads, head_dim, dtype) for length in (203, 37, 130)]

    def outputs(*parts: _Sequence) -> tuple[Tensor, ...]:
        size = {"layers": 1, "num_blocks": 64, "kv_heads": kv_heads, "head_dim": head_dim, "block_tokens": block_tokens}
        [cache] = allocate(**size, dtype=dtype, device=torch.device("cpu"))  # type: ignore[arg-type]
        _poison(cache)
        layout = _lay_out(list(parts), block_tokens, 64)
        for part in parts:
            _fill_history(part, cache, block_tokens)
        new = [torch.cat([getattr(s, name)[s.length - s.new :] for s in parts]) for name in ("query", "key", "value")]
        out = kernel.attend(*new, cache, layout, scale=head_dim**-0.5, window=window, rules=rules)
        return out.split([part.new for part in parts])

    first, second, third = outputs(*sequences)
    assert torch.equal(outputs(sequences[2])[0], third)
    for begin, end in [(0, 1), (0, 64), (64, 203), (150, 151), (63, 66), (127, 132), (77, 200), (202, 203)]:
        chunk, beside = outputs(sequences[0].part(begin, end), sequences[1])
        assert torch.equal(chunk, first[begin:end])
        assert torch.equal(beside, second)


@pytest.mark.parametrize("asked", [{"position_bias": torch.zeros(1)}, {"is_causal": False}, {"something_new": 0.0}])
def test_what_attention_is_asked_for_and_does_not_know_is_refused_by_name(asked: dict[str, object]) -> None:
    """A keyword that were dropped would change every token without a word."""
    register_interface()
    attend = AttentionInterface()[INTERFACE_NAME]
    heads = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ConfigError, match=f"Linear asks attention for {next(iter(asked))}"):
        attend(nn.Linear(1, 1), heads, heads, heads, None, scaling=1.0, dropout=0.0, **asked)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block_tokens"), [(8, 2, 64, 16), (3, 3, 96, 16), (4, 1, 20, 8)])
@pytest.mark.parametrize("window", [0, 21])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_of_whole_numbers_is_written_alike_by_both_and_off_by_half_a_scale(
    heads: int, kv_heads: int, head_dim: int, block_tokens: int, window: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(head_dim)
    random.seed(5)
    sequences = [_Sequence(*lengths, heads, kv_heads, head_dim, dtype) for lengths in [(1, 1), (70, 33), (40, 1), (17, 17)]]
    size = {"layers": 1, "num_blocks": 40, "kv_heads": kv_heads, "head_dim": head_dim, "block_tokens": block_tokens}
    [by_torch], [by_kernel] = (allocate(**size, dtype=torch.int8, device=torch.device("cpu")) for _ in range(2))  # type: ignore[arg-type]
    layout = _lay_out(sequences, block_tokens, 40)
    for cache in (by_torch, by_kernel):
        _poison(cache)
        for sequence in sequences:
            _fill_history(sequence, cache, block_tokens)
    new = [torch.cat([getattr(s, name)[s.length - s.new :] for s in sequences]) for name in ("query", "key", "value")]
    scale = head_dim**-0.5
    rules = ScoreRules(softcap=2.5, sinks_H=torch.randn(heads), bias_HL=torch.randn(heads, 80))

    kernel = CpuKernelBackend(cpu_kernels())
    for given in (ScoreRules(), rules):
        expected = TorchBackend().attend(*new, by_torch, layout, scale=scale, window=window, rules=given)
        out = kernel.attend(*new, by_kernel, layout, scale=scale, window=window, rules=given)
        for name in ("keys", "values", "key_scales", "value_scales"):
            ours, theirs = getattr(by_kernel, name), getattr(by_torch, name)
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
        tolerance = 3e-6 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)

    for sequence in sequences:
        kept = by_kernel.read(torch.tensor(sequence.blocks), torch.float32)
        for whole, plain in zip(kept, (sequence.key, sequence.value), strict=True):
            wide = plain.float()
            off = (whole[:, : sequence.length].transpose(0, 1) - wide).abs().amax(dim=2)
            assert bool((off <= wide.abs().amax(dim=2) / 127 * 0.51).all())
    exact = torch.cat([s.expected(scale, window, rules) for s in sequences])
    # A score is off by |q| times what a key is off by, an output by what scores and values are off by: hundredths here.
    torch.testing.assert_close(out.double(), exact, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("fault", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_none_shows_in_whatever_reads_a_cache_of_whole_numbers(backend: Backend, fault: float) -> None:
    torch.manual_seed(2)
    random.seed(2)
    sequences = [_Sequence(5, 5, 2, 2, 16, torch.float32), _Sequence(3, 3, 2, 2, 16, torch.float32)]
    sequences[0].value[3, 1, 7] = fault
    [cache] = allocate(
        layers=1, num_blocks=4, kv_heads=2, head_dim=16, block_tokens=16, dtype=torch.int8, device=torch.device("cpu")
    )
    layout = _lay_out(sequences, 16, 4)
    new = [torch.cat([getattr(s, name) for s in sequences]) for name in ("query", "key", "value")]
    out = backend.attend(*new, cache, layout, scale=0.25, window=0)
    assert out[3:5, 1].isnan().all()
    assert out[:, 0].isfinite().all()
    assert out[5:].isfinite().all()
