"""Attention of rows that hold several samples, by their lengths: no mask is made, and nothing is computed that one would hide.

B rows   L tokens   T = B x L   S samples of all rows   H query heads   G key/value heads   D head size
"""

from __future__ import annotations

import inspect
from typing import Final, Protocol, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from finetune.errors import ConfigError

INTERFACE_NAME: Final = "tessera_packed"
FAMILIES: Final = frozenset(
    ["gpt_neox", "gpt2", "opt", "llama", "mistral", "qwen2", "phi", "qwen3", "olmo2", "phi3", "stablelm", "starcoder2"]
)
"""Families of ``finetune.model.isolation`` whose attention goes by transformers' interface with its scores as they are."""
_DROPOUTS: Final = ("attention_dropout", "attn_pdrop")
"""Keys of configurations that drop out of attention itself."""
_LEAST_CAPABILITY: Final = (8, 0)
_LARGEST_HEAD: Final = 256
_HEAD_MULTIPLE: Final = 8


class Varlen(Protocol):
    """``torch.nn.attention.varlen.varlen_attn``: attention of S sequences that lie one after the other."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float | None,
        window_size: tuple[int, int],
    ) -> Tensor:
        """q [T, H, D], k and v [T, H, D] to [T, H, D].

        Args:
            cu_seq_q: int32 [S + 1], where each sequence begins, and T.
            max_q: tokens of the longest one.
            window_size: how many positions before its own and after it a query sees; -1: all.
        """
        ...


def varlen_attention() -> Varlen | None:
    """torch's, where this torch has it with the options that are asked for here."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = {"scale", "window_size"} <= set(inspect.signature(varlen_attn).parameters)
    return cast(Varlen, varlen_attn) if known else None


def obstacle(config: PretrainedConfig, device: str, precision: str) -> str:
    """Why a model's attention cannot be computed by lengths; empty where it can.

    Args:
        device: ``cpu`` or ``cuda``.
        precision: ``fp32``, ``bf16`` or ``fp16``.
    """
    if varlen_attention() is None:
        return f"torch {torch.__version__} has no torch.nn.attention.varlen that does it"
    if device != "cuda":
        return f"it is for GPUs, and this run is on the {device}"
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < _LEAST_CAPABILITY:
        return "it needs a GPU of compute capability 8.0 or higher"
    if precision == "fp32":
        return "it is for bf16 and fp16, and this run is in fp32"
    if config.model_type not in FAMILIES:
        return f"a {config.model_type} model's attention is not computed so"
    dropped = [key for key in _DROPOUTS if getattr(config, key, 0.0)]
    if dropped:
        return f"the model's {dropped[0]} is {getattr(config, dropped[0])}, and it drops nothing"
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if size > _LARGEST_HEAD or size % _HEAD_MULTIPLE:
        return f"the model's heads have {size} elements; it computes multiples of {_HEAD_MULTIPLE} up to {_LARGEST_HEAD}"
    return ""


def is_by_length(wanted: str, config: PretrainedConfig, device: str, precision: str) -> bool:
    """Whether rows that hold several samples are computed by their lengths.

    Args:
        wanted: ``activations.packed_attention``.

    Raises:
        ConfigError: that is asked for and cannot be.
    """
    why = "it is not asked for" if wanted == "mask" else obstacle(config, device, precision)
    if why and wanted == "varlen":
        raise ConfigError(f"activations.packed_attention is varlen; {why}: choose auto, or mask")
    return not why


class PackedAttention:
    """Lets a model's attention keep the samples of each batch apart, from ``begin`` until its backward pass is over."""

    def __init__(self, model: PreTrainedModel, varlen: Varlen) -> None:
        """Take the place of the model's attention, for batches that were begun here."""
        self._varlen = varlen
        self._starts: Tensor | None = None
        self._longest = 0
        # One name: a process trains one model. Without a mask of that name transformers makes none.
        AttentionInterface.register(INTERFACE_NAME, self._attend)
        model.config._attn_implementation = INTERFACE_NAME

    def begin(self, inputs_BL: Tensor, segments_BL: Tensor | None, device: torch.device) -> None:
        """Whose tokens the next batch has.

        Args:
            segments_BL: as ``Microbatch.segments``, on the host; ``None``: each row is one sample.
        """
        starts = starts_of(torch.zeros_like(inputs_BL) if segments_BL is None else segments_BL)
        self._longest = int(starts.diff().max())
        self._starts = starts.to(device)

    def _attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_: object,
    ) -> tuple[Tensor, None]:
        """What transformers' attention modules call: q [B, H, L, D], k and v [B, G, L, D]; returns [B, L, H, D]."""
        assert self._starts is not None, "a batch is begun before it is computed"
        assert attention_mask is None, "samples are kept apart by their lengths"
        assert not dropout, "obstacle() was asked before"
        assert softcap is None, f"{type(module).__name__} is of no family above"
        assert s_aux is None, f"{type(module).__name__} is of no family above"
        heads, (rows, groups, tokens, _size) = query.shape[1], key.shape
        if groups < heads:  # the first release of the kernel knows no groups
            key, value = (part.repeat_interleave(heads // groups, dim=1) for part in (key, value))
        q, k, v = (part.to(value.dtype).transpose(1, 2).flatten(0, 1) for part in (query, key, value))
        before = -1 if sliding_window is None else sliding_window - 1  # a window of w is of itself and w - 1 before it
        starts, longest = self._starts, self._longest
        out = self._varlen(q, k, v, starts, starts, longest, longest, scale=scaling, window_size=(before, 0))
        return out.view(rows, tokens, heads, -1), None


def starts_of(segments_BL: Tensor) -> Tensor:
    """Where each sample begins in the rows one after the other, and where the last one ends: int32 [S + 1]."""
    begins = torch.ones_like(segments_BL, dtype=torch.bool)
    begins[:, 1:] = segments_BL[:, 1:] != segments_BL[:, :-1]
    end = torch.tensor([segments_BL.numel()])
    return torch.cat([begins.flatten().nonzero().flatten(), end]).int()
