"""What of a model's configuration, or of the options for it, is not served."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from serve.errors import ConfigError
from serve.model.families import FAMILIES, head_dim
from serve.types import LengthRule

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def check_max_model_len(wanted: int | None, limit: int | None, most: int | None = None) -> int:
    """Positions a sequence may have: what is wanted, or all that the model has.

    Args:
        limit: positions of the model; ``None`` where its configuration has no number of them.
        most: positions to which its angles are extended where more are wanted; ``None`` where they are not.

    Raises:
        ConfigError: the model has fewer, or does not say how many and nothing is wanted.
    """
    if limit is None:
        if wanted is None:
            raise ConfigError(
                "model.max_model_len is not set; this model's config.json has no number of positions, so it must be"
            )
        return wanted
    if wanted is not None and wanted > max(limit, most or 0):
        extended = "" if most is None else f", extended to {most}"
        raise ConfigError(f"model.max_model_len is {wanted}; the model has {limit} positions{extended}")
    return wanted or limit


def check_dtype(dtype: str, device: str) -> None:
    """Refuse half precision where the CPU would compute in it.

    Raises:
        ConfigError: that.
    """
    if device == "cpu" and dtype == "float16":
        raise ConfigError("model.dtype is float16; on the CPU choose float32 or bfloat16")


def check_quantization(quantization: str, device: str) -> None:
    """Refuse to round to what this device does not compute with.

    Raises:
        ConfigError: fp8 on the CPU.
    """
    if quantization == "fp8" and device == "cpu":
        raise ConfigError("model.quantization is fp8; it is for GPUs, and model.device is cpu: choose int8")


def extended_positions(limit: int | None, config: Mapping[str, Any]) -> int | None:
    """Positions to which ``dynamic`` angles can be extended when asked: so many times the model's own as their factor says.

    Args:
        limit: ``max_position_embeddings``.
        config: what ``config.json`` says, checked; ``rope_parameters``, or ``rope_scaling`` of older files.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if limit is None or rope_type(rope) != "dynamic":
        return None
    return max(limit, int(limit * float(rope.get("factor") or 1.0)))


def length_rule(config: PretrainedConfig) -> LengthRule | None:
    """How angles depend on a sequence's length; ``None`` where they do not.

    ``dynamic`` has others for every length beyond the model's own, ``longrope`` one other set for all lengths beyond
    ``original_max_position_embeddings``.

    Raises:
        ConfigError: longrope without a length before it was extended.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope_type(rope)
    if kind == "dynamic":
        return LengthRule(plain_tokens=int(config.max_position_embeddings), each_length=True, recomputes=False)
    if kind != "longrope":
        return None
    before = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
    if before is None:
        raise ConfigError("config.json: rope_type is 'longrope', without original_max_position_embeddings; it is not served")
    recomputes = FAMILIES[config.model_type].recomputes_long
    return LengthRule(plain_tokens=int(before), each_length=False, recomputes=recomputes)


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
    if FAMILIES[config.model_type].turns_pairs and config.rotary_dim not in range(2, width + 1, 2):
        raise ConfigError(
            f"config.json: rotary_dim is {config.rotary_dim}; it must be an even number of a head's {width} features"
        )
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
