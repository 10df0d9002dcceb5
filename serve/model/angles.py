"""Rotary angles that are extended beyond a length: each token's are chosen by the length of its own sequence.

transformers chooses them by the longest sequence of a batch, and keeps ``dynamic`` ones for what is computed later; its modules
keep nothing here. Shapes: see ``serve.model.attention``; F angles of a head.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from serve.model.attention import StepState
from serve.model.pretrained import frequencies
from serve.types import LengthRule


def turn_by_own_lengths(model: nn.Module, rule: LengthRule, state: StepState) -> None:
    """Let a model's rotary embeddings turn each token of a step by its length in the step's layout.

    What they do with frequencies and positions stays theirs: their own forward is given frequencies for each token.
    """
    modules = [module for module in model.modules() if isinstance(getattr(module, "original_inv_freq", None), Tensor)]
    assert modules, "a model whose angles depend on lengths has rotary embeddings"
    for module in modules:
        module.forward = _forward(module, rule, state)


def _forward(module: nn.Module, rule: LengthRule, state: StepState) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    # Beneath transformers' decorator, which chooses by the batch.
    plain: Callable[[SimpleNamespace, Tensor, Tensor], tuple[Tensor, Tensor]] = inspect.unwrap(type(module).forward)
    beyond, within_F = _beyond(module, rule), module.get_buffer("original_inv_freq")

    def forward(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        assert state.layout is not None, "angles were asked for outside a step"
        lengths_T, frequencies_TF = state.layout.lengths, within_F
        if lengths_T is not None:
            lengths_T1 = lengths_T[:, None]
            frequencies_TF = torch.where(lengths_T1 > rule.plain_tokens, beyond(lengths_T1), within_F)
        return plain(SimpleNamespace(inv_freq=frequencies_TF, attention_scaling=module.attention_scaling), x, position_ids)

    return forward


def _beyond(module: nn.Module, rule: LengthRule) -> Callable[[Tensor], Tensor]:
    """Frequencies of lengths beyond the plain ones, [T, 1] to [T, F] or, where all have the same, to [F]."""
    if rule.each_length:
        return lambda lengths_T1: frequencies(module, lengths_T1)
    long_F = frequencies(module, rule.plain_tokens + 1)
    return lambda _: long_F
