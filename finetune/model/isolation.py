"""What a transformers model is called with, so that packed samples do not see each other.

B rows   L tokens   Segments are numbered as ``Microbatch.segments`` says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from finetune.data.batches import Microbatch
from finetune.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

BY_POSITIONS: Final = frozenset(
    [
        "gpt_neox",
        "gpt2",
        "gptj",
        "gpt_neo",
        "llama",
        "mistral",
        "qwen2",
        "phi",
        "qwen3",
        "gemma2",
        "olmo2",
        "phi3",
        "stablelm",
        "starcoder2",
    ]
)
"""Families whose own masks, sliding windows included, follow from positions that begin again with each segment."""
BY_MASK: Final = frozenset({"opt"})
"""Families that make their mask without the positions; none has windows, so one mask serves all layers."""


def check_isolation(config: PretrainedConfig, packing: str) -> None:
    """Refuse to pack samples for a model of which it is not known that they stay apart.

    Raises:
        ConfigError: names ``data.packing`` and the ways out.
    """
    if packing == "isolate" and config.model_type not in BY_POSITIONS | BY_MASK:
        known = ", ".join(sorted(BY_POSITIONS | BY_MASK))
        raise ConfigError(
            f"data.packing: isolate keeps packed samples apart in {known}; for {config.model_type} it is not known to: "
            "set data.packing to none, or to join"
        )


def forward_inputs(
    batch: Microbatch, config: PretrainedConfig, device: torch.device, *, masked: bool = True
) -> dict[str, torch.Tensor | bool]:
    """Keyword arguments of a causal language model's forward for ``batch``.

    Args:
        config: the model's transformers configuration.
        masked: whether a mask keeps its samples apart, and not ``finetune.model.packed_attention``.
    """
    inputs: dict[str, torch.Tensor | bool] = {"input_ids": batch.inputs.to(device), "use_cache": False}
    if batch.segments is not None:
        segments = batch.segments.to(device)
        inputs["position_ids"] = positions_of(segments)
        if masked and config.model_type in BY_MASK:
            mask = mask_of(segments)
            # Eager attention adds the mask to its scores; the others take it as it is.
            eager = config._attn_implementation == "eager"
            hidden = torch.finfo(torch.float32).min
            inputs["attention_mask"] = torch.zeros(mask.shape, device=device).masked_fill(~mask, hidden) if eager else mask
    return inputs


def positions_of(segments: torch.Tensor) -> torch.Tensor:
    """Positions that begin again at 0 with each segment; int64 [B, L]."""
    index = torch.arange(segments.shape[1], device=segments.device).expand_as(segments)
    begins = torch.ones_like(segments, dtype=torch.bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return index - torch.where(begins, index, 0).cummax(dim=1).values


def mask_of(segments: torch.Tensor) -> torch.Tensor:
    """True where a query (third axis) may see a key (fourth): earlier or equal, and of its own segment; bool [B, 1, L, L]."""
    length = segments.shape[1]
    same = segments[:, None, :, None] == segments[:, None, None, :]
    return same & torch.ones(length, length, dtype=torch.bool, device=segments.device).tril()
