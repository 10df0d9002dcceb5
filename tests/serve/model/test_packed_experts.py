"""Experts packed one by one give what each token's experts give by themselves, in a recorded step wherever tokens go."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from serve.model.linear import KernelPacker, Packer, plain
from serve.model.packed_experts import Expert, PackedExperts
from serve.model.recording import Recorder, StepMemory, Steps
from tests.support.kernels import cpu_kernels

EXPERTS, HIDDEN, INNER = 6, 8, 12


def gate(both: Tensor) -> Tensor:
    first, second = both.chunk(2, dim=-1)
    return torch.tanh(first) * second


def made(dtype: torch.dtype, pack: Packer = plain) -> tuple[list[tuple[Tensor, Tensor]], PackedExperts]:
    torch.manual_seed(3)
    weights = [
        (torch.randn(2 * INNER, HIDDEN, dtype=dtype) * 0.3, torch.randn(HIDDEN, INNER, dtype=dtype) * 0.3)
        for _ in range(EXPERTS)
    ]
    return weights, PackedExperts([Expert(pack(up, None), pack(down, None), (HIDDEN, INNER)) for up, down in weights], gate)


def by_token(weights: list[tuple[Tensor, Tensor]], hidden_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
    rows = []
    for x, experts, shares in zip(hidden_TH, experts_TK.tolist(), weights_TK, strict=True):
        given = [weights[expert][1] @ gate(weights[expert][0] @ x) for expert in experts]
        rows.append(sum(share.double() * y.double() for share, y in zip(shares, given, strict=True)))
    return torch.stack(rows).to(hidden_TH.dtype)


def routed(seed: int, tokens: int, chosen: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    experts_TK = torch.stack([torch.randperm(EXPERTS, generator=draw)[:chosen] for _ in range(tokens)])
    hidden_TH = torch.randn(tokens, HIDDEN, generator=draw).to(dtype)
    return hidden_TH, experts_TK, torch.rand(tokens, chosen, generator=draw)


@torch.inference_mode()
@pytest.mark.parametrize("tokens", [1, 2, 33])
@pytest.mark.parametrize("chosen", [1, 2, EXPERTS])
@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_each_token_has_the_weighted_sum_of_its_experts(tokens: int, chosen: int, dtype: torch.dtype, within: float) -> None:
    weights, mix = made(dtype)
    inputs = routed(tokens, tokens, chosen, dtype)
    out = mix(*inputs)
    assert out.dtype == dtype
    torch.testing.assert_close(out, by_token(weights, *inputs), rtol=within, atol=within)


@torch.inference_mode()
def test_a_token_is_given_the_same_whoever_else_is_in_the_step() -> None:
    _, mix = made(torch.float32)
    hidden_TH, experts_TK, weights_TK = routed(1, 9, 2, torch.float32)
    together = mix(hidden_TH, experts_TK, weights_TK)
    for token in range(9):
        alone = mix(*(part[token : token + 1] for part in (hidden_TH, experts_TK, weights_TK)))
        torch.testing.assert_close(together[token : token + 1], alone, rtol=1e-6, atol=1e-6)


@torch.inference_mode()
def test_a_recorded_step_routes_anew_in_every_replay() -> None:
    kernels = cpu_kernels()
    weights, mix = made(torch.float32, KernelPacker(kernels))
    inputs = routed(1, 4, 2, torch.float32)
    with Recorder(Steps(kernels), StepMemory()) as recorder:
        out = mix(*inputs)
    program = recorder.program()
    assert program.parts == 1, "what the experts call is theirs alone to call again"
    for seed in (2, 3):
        others = routed(seed, 4, 2, torch.float32)
        assert not torch.equal(others[1].sort().values, inputs[1].sort().values), "other experts"
        for mine, other in zip(inputs, others, strict=True):
            mine.copy_(other)
        program.replay()
        torch.testing.assert_close(out, by_token(weights, *others), rtol=1e-6, atol=1e-6)


@torch.inference_mode()
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("part", [0, 1])
def test_a_weight_of_any_expert_that_is_not_finite_is_told(part: int, number: float) -> None:
    weights, mix = made(torch.float32)
    assert mix.are_finite(torch.float32, torch.device("cpu"))
    weights[EXPERTS - 2][part][3, 5] = number
    assert not mix.are_finite(torch.float32, torch.device("cpu"))
