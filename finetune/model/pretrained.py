"""The few calls of transformers that it leaves without types, with theirs: everything else asks for them here."""

from __future__ import annotations

from typing import Final, Protocol

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel


class _Maker(Protocol):
    """What we call of ``AutoModelForCausalLM``, which has no types."""

    def from_config(self, config: PretrainedConfig, *, dtype: torch.dtype = ...) -> PreTrainedModel: ...


class _Model(Protocol):
    """What we call of ``PreTrainedModel``, which leaves it without types."""

    def get_output_embeddings(self) -> nn.Module | None: ...

    def enable_input_require_grads(self) -> None: ...

    def _init_weights(self, module: nn.Module) -> None: ...


_MAKER: Final[_Maker] = AutoModelForCausalLM


def new_model(config: PretrainedConfig, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The causal language model that a configuration describes, in training mode; on the device that is torch's default now.

    Args:
        dtype: of its parameters; unset: as the configuration says, else torch's default.
    """
    return _MAKER.from_config(config) if dtype is None else _MAKER.from_config(config, dtype=dtype)


def head_of(model: _Model) -> nn.Module | None:
    """The layer from the last hidden states to logits; ``None`` where transformers does not know which it is."""
    return model.get_output_embeddings()


def initialise_module(model: _Model, module: nn.Module) -> None:
    """Give the parameters of one module, and of its direct children, their starting values by the model's rules."""
    model._init_weights(module)


def let_inputs_need_gradients(model: _Model) -> None:
    """Let what the embedding gives on need a gradient, though the embedding itself be frozen."""
    model.enable_input_require_grads()
