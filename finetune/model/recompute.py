"""Activation checkpointing: a block keeps its input alone and is computed again in the backward pass.

Where that input waits is ``device`` or ``cpu``; ``none`` computes nothing again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from finetune.errors import ConfigError
from finetune.model.host_inputs import cuda_inputs
from finetune.model.pretrained import let_inputs_need_gradients

R = TypeVar("R")


def recompute_blocks(model: PreTrainedModel, where: str, *, pin_memory: bool) -> None:
    """Let every block of ``model`` be computed again.

    Random states are restored, so dropout drops the same. The reentrant kind is used: under ZeRO-3 the other one compares
    weights that are whole in the forward pass with ones that are not.

    Raises:
        ConfigError: transformers knows no blocks of this model.
    """
    if where == "none":
        return
    if not model.supports_gradient_checkpointing:
        rule = f"be none for a {model.config.model_type} model: transformers knows no blocks of it"
        raise ConfigError(f"activations.checkpoint is {where!r}; it must {rule}")

    def run(block: Callable[..., object], *arguments: object) -> object:
        with _kept(where, pin_memory):
            return checkpoint(block, *arguments, use_reentrant=True)

    model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=run)
    # Without this a block whose input needs no gradient (frozen embeddings) would learn nothing.
    let_inputs_need_gradients(model)


def computed_again(function: Callable[..., R], where: str, *inputs: torch.Tensor, **around: Any) -> R:
    """``function(*inputs, **around)``, which a backward pass computes again from the same random state.

    For modules whose weights lie here whole: the kind of checkpointing that is not reentrant.

    Args:
        around: kept as they are.
    """
    if where == "none" or not torch.is_grad_enabled():
        return function(*inputs, **around)
    with _kept(where, pin_memory=inputs[0].is_cuda):
        result: R = checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=True, **around)
        return result


def _kept(where: str, pin_memory: bool) -> AbstractContextManager[object]:
    if where != "cpu":
        return nullcontext()
    return cuda_inputs().hooks() if pin_memory else save_on_cpu()
