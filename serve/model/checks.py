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


def served_positions(limit: int | None, rope: Mapping[str, Any], original: int | None) -> int | None:
    """Positions a sequence may have so that the angles of its rotary embedding depend on nothing but itself.

    transformers chooses the angles of ``dynamic`` and ``longrope`` by the longest sequence of a batch, and changes them in the
    middle of one that grows. Up to the model's own length, and the length before it was extended, they are always the same.

    Args:
        limit: ``max_position_embeddings``.
        rope: ``rope_parameters``, or ``rope_scaling`` of older files.
        original: ``original_max_position_embeddings`` where it stands beside these.

    Raises:
        ConfigError: longrope without a length before it was extended.
    """
    if rope_type(rope) != "longrope":
        return limit
    before = rope.get("original_max_position_embeddings") or original
    if before is None:
        raise ConfigError("config.json: rope_type is 'longrope', without original_max_position_embeddings; it is not served")
    return int(before) if limit is None else min(limit, int(before))


def rope_type(rope: Mapping[str, Any]) -> str:
    """What a rotary embedding's angles follow; older files say it by another name."""
    return str(rope.get("rope_type") or rope.get("type") or "default")


def check_rope(config: PretrainedConfig) -> None:
    """Refuse rotary embeddings that fit no head.

    Raises:
        ConfigError: no family turns that part of a head.
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


def check_switches(config: PretrainedConfig) -> None:
    """Refuse ways to compute that a switch asks for and that are not computed here.

    Raises:
        ConfigError: names the switch.
    """
    if getattr(config, "slow_but_exact", False) and config.pretraining_tp > 1:
        raise ConfigError(
            f"config.json: slow_but_exact with pretraining_tp {config.pretraining_tp}; sums in the order of other ranks are "
            "not computed"
        )
    if getattr(config, "use_bidirectional_attention", None):
        raise ConfigError("config.json: use_bidirectional_attention; only attention to earlier positions is served")
    if getattr(config, "add_cross_attention", False):
        raise ConfigError("config.json: add_cross_attention; there is nothing for it to attend to")
