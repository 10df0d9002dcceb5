"""What of a model's configuration, or of the options for it, is not served."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from serve.errors import ConfigError
from serve.model.families import FAMILIES, head_dim

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def check_max_model_len(wanted: int | None, limit: int | None) -> int:
    """Positions a sequence may have: what is wanted, or all that the model has.

    Args:
        limit: positions of the model; ``None`` where its configuration has no number of them.

    Raises:
        ConfigError: the model has fewer, or does not say how many and nothing is wanted.
    """
    if limit is None:
        if wanted is None:
            raise ConfigError(
                "model.max_model_len is not set; this model's config.json has no number of positions, so it must be"
            )
        return wanted
    if wanted is not None and wanted > limit:
        raise ConfigError(f"model.max_model_len is {wanted}; the model has {limit} positions")
    return wanted or limit


def check_dtype(dtype: str, device: str) -> None:
    """Refuse half precision where the CPU would compute in it.

    Raises:
        ConfigError: that.
    """
    if device == "cpu" and dtype == "float16":
        raise ConfigError("model.dtype is float16; on the CPU choose float32 or bfloat16")


def check_rope_type(rope: Mapping[str, Any]) -> None:
    """Refuse rotary embeddings whose angles depend on the longest sequence of the batch.

    Raises:
        ConfigError: one request's output would change with its neighbours'.
    """
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind in ("dynamic", "longrope"):
        raise ConfigError(
            f"config.json: rope_type is {kind!r}, whose angles depend on the longest sequence of a batch; it is not served"
        )


def check_rope(config: PretrainedConfig) -> None:
    """Refuse rotary embeddings whose angles depend on the longest sequence of the batch, or that fit no head.

    Raises:
        ConfigError: one request's output would change with its neighbours', or no family turns that part of a head.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    width, factor = head_dim(config), float(rope.get("partial_rotary_factor", 1.0))
    if FAMILIES[config.model_type].rotary_function:
        turned = int(width * factor)
        if not 0.0 <= factor <= 1.0 or (turned % 2 and turned == width):
            raise ConfigError(
                f"config.json: partial_rotary_factor {factor:g} of a head of {width} features; at most all of them, in pairs, "
                "can be turned"
            )
        partial = FAMILIES[config.model_type].partial_rotary
        if config.model_type != "gpt_neox" and (turned % 2 or (turned != width and not partial)):
            raise ConfigError(
                f"config.json: partial_rotary_factor is {factor:g}; {config.model_type} with heads of {width} features cannot "
                f"turn {turned} of them"
            )
    check_rope_type(rope)
