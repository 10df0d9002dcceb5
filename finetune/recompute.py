"""Activation checkpointing: a block keeps its input alone and is computed again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from finetune.errors import ConfigError


def recompute_blocks(model: PreTrainedModel, where: str, *, pin_memory: bool) -> None:
    """Let every block of ``model`` be computed again: ``none``, or with its input kept on the ``device`` or the ``cpu``.

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

    def keep() -> AbstractContextManager[Any]:
        return save_on_cpu(pin_memory=pin_memory) if where == "cpu" else nullcontext()

    def run(block: Callable[..., Any], *arguments: Any) -> Any:
        with keep():
            return checkpoint(block, *arguments, use_reentrant=True)

    model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=run)
    # Without this a block whose input needs no gradient (frozen embeddings) would learn nothing.
    model.enable_input_require_grads()
