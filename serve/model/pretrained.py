"""The few calls of transformers that it leaves without types, with theirs: everything else asks for them here."""

from __future__ import annotations

import importlib
import math
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


class _Maker(Protocol):
    """What we call of ``AutoModelForCausalLM``, which has no types."""

    def from_config(self, config: PretrainedConfig, *, dtype: torch.dtype, attn_implementation: str) -> PreTrainedModel: ...


class _Model(Protocol):
    """What we call of ``PreTrainedModel``, which leaves it without types."""

    def get_output_embeddings(self) -> nn.Module: ...

    def _init_weights(self, module: nn.Module) -> None: ...


class _MakesFrequencies(Protocol):
    """One of ``ROPE_INIT_FUNCTIONS``: inverse frequencies, and what cosines and sines are multiplied with."""

    def __call__(self, config: object, device: torch.device, seq_len: int | Tensor) -> tuple[Tensor, float]: ...


_MAKER: Final[_Maker] = AutoModelForCausalLM
_TABLE: Final = "torch._meta_registrations"
"""What operators do on ``meta``, those that torch defines in Python; see ``serve.worker.lean_torch``."""
_ONE_AT_A_TIME: Final = threading.Lock()
"""Held while a model is made without values: transformers switches them off for the whole process, and two threads that did it
at once would leave them off."""


class _NoLargeMemory(TorchFunctionMode):
    """Within, what is made to be filled later is made on ``meta``, and so is all that is large.

    The rest, what buffers are computed from, is computed where it always is: on ``meta`` torch computes shapes and types in
    Python, with its compiler, which takes over a second to import.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if options.get("device") is None and func in _MOST_NUMBERS and not _is_small(func, args, options):
            options["device"] = "meta"
        return func(*args, **options)


_MOST_NUMBERS: Final[dict[Callable[..., Any], int]] = {
    torch.empty: -1, torch.zeros: 1 << 24, torch.ones: 1 << 24, torch.full: 1 << 24, torch.arange: 1 << 18,
}  # fmt: skip
"""What makes tensors, and how many numbers are few; from those of a range, tables of as many rows are computed."""


def _is_small(func: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]) -> bool:
    if func is torch.arange:
        bounds = [*args, *(options[name] for name in ("start", "end", "step") if name in options)]
        return all(abs(bound) <= _MOST_NUMBERS[func] for bound in bounds)
    size = options.get("size", args[0] if args else ())
    count: int = math.prod((size, *args[1:]) if isinstance(size, int) else size)
    return count <= _MOST_NUMBERS[func]


def new_model_on_meta(config: PretrainedConfig, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    """The model that a configuration describes, in evaluation mode: its shapes and types, without any memory or value."""
    try:
        model = _made(config, dtype, attention)
    except NotImplementedError:  # an operator that has no rule for ``meta`` but in torch's table, which ranks do not import
        if _TABLE in sys.modules:
            raise
        importlib.import_module(_TABLE)
        model = _made(config, dtype, attention)
    model.tie_weights()
    nn.Module.eval(model)
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, value in module._parameters.items():
            if value is not None and not value.is_meta:
                module._parameters[name] = made.setdefault(id(value), nn.Parameter(_on_meta(value)))
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = _on_meta(buffer)
    return model


def _made(config: PretrainedConfig, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    with _ONE_AT_A_TIME, no_init_weights(), _NoLargeMemory():
        return _MAKER.from_config(config, dtype=dtype, attn_implementation=attention)


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


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
