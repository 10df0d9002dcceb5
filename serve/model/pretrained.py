"""The few calls of transformers that it leaves without types, with theirs: everything else asks for them here."""

from __future__ import annotations

from typing import Final, Protocol

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


class _Maker(Protocol):
    """``AutoModelForCausalLM``."""

    def from_config(self, config: PretrainedConfig, *, dtype: torch.dtype, attn_implementation: str) -> PreTrainedModel: ...


class _Model(Protocol):
    """``PreTrainedModel``."""

    def get_output_embeddings(self) -> nn.Module: ...

    def _init_weights(self, module: nn.Module) -> None: ...


class _MakesFrequencies(Protocol):
    """One of ``ROPE_INIT_FUNCTIONS``: inverse frequencies, and what cosines and sines are multiplied with."""

    def __call__(self, config: object, device: torch.device, seq_len: int | Tensor) -> tuple[Tensor, float]: ...


_MAKER: Final[_Maker] = AutoModelForCausalLM


def new_model(config: PretrainedConfig, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    """The model that a configuration describes, in evaluation mode; on the device that is torch's default now."""
    model = _MAKER.from_config(config, dtype=dtype, attn_implementation=attention)
    nn.Module.eval(model)
    return model


def head_of(model: _Model) -> nn.Module:
    """The layer from the last hidden states to logits: every causal model has one."""
    return model.get_output_embeddings()


def vocabulary_rows(model: PreTrainedModel) -> int:
    """Rows of the input embedding: how many token ids the model has a vector for."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return weight.shape[0]


def initialise(model: _Model, module: nn.Module) -> None:
    """Compute what no checkpoint stores of one module, as transformers does for a new model."""
    model._init_weights(module)


def frequencies(rotary: nn.Module, length: int | Tensor) -> Tensor:
    """The inverse frequencies that a rotary embedding has for sequences of a length, or of each of a column of lengths."""
    make: _MakesFrequencies = ROPE_INIT_FUNCTIONS[str(rotary.rope_type)]
    found, _ = make(rotary.config, rotary.get_buffer("original_inv_freq").device, seq_len=length)
    return found
