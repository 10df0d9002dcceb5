"""Whether two configurations describe one model, whichever releases of transformers and of what trainers wrote them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from checkpoint.errors import shown

_OF_NO_ANSWER = (
    *(
        "_name_or_path",
        "architectures",
        "auto_map",
        "dropout",
        "dtype",
        "initializer_range",
        "problem_type",
        "router_",
        "output_",
        "pdrop",
        "init_std",
    ),
    *(
        "return_dict",
        "token_id",
        "tokenizer_class",
        "transformers_version",
        "use_cache",
        "pretraining_tp",
        "summary_",
        "problem_type",
    ),
    *("softmax_in_fp32", "upcast_attn", "slow_but_exact", "layerdrop"),
)
"""Parts of the names of keys that compute nothing, or nothing else, and that whoever saves a model writes anew."""
_POSITIONS = ("max_position_embeddings", "original_max_position_embeddings", "n_positions", "n_ctx")
"""How many positions there are computes nothing but where rotary positions are scaled by it; learned ones have their shape."""
_USUAL = (("rope_type", "default"), ("partial_rotary_factor", 1.0))
_WINDOWS = ("sliding_window", "use_sliding_window", "max_window_layers")


def difference(was: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The first key by which two configurations describe other models, with both values; empty where they describe one.

    What a file leaves out has the value that its family's class in transformers gives it. That is imported where the two are
    not word for word the same.

    Args:
        was: as ``config.json`` has it, and as the libraries of today take it.
        now: likewise.
    """
    if was == now:
        return ""
    ours, theirs = _resolved(was), _resolved(now)
    for key in sorted(ours.keys() | theirs.keys(), key=lambda key: (key != "rope_parameters", key)):
        if ours.get(key) != theirs.get(key):
            return f"{key} was {shown(ours.get(key))} and is {shown(theirs.get(key))}"
    return ""


def _resolved(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a configuration says that computes something, with its family's defaults."""
    from transformers import CONFIG_MAPPING

    try:
        config_class = CONFIG_MAPPING[config["model_type"]]
        known = config_class().to_dict()
        values = {**config_class.from_dict(copy.deepcopy(dict(config))).to_dict(), "model_type": config["model_type"]}
    except Exception:  # each family's class raises its own kinds; then its words alone are compared
        known = values = dict(config)
    said = {key: values.get(key) for key in known if not any(part in key for part in _OF_NO_ANSWER)}
    width = values.get("hidden_size", values.get("n_embd"))
    heads = values.get("num_attention_heads", values.get("n_head"))
    for key, usual in (("n_inner", 4), ("intermediate_size", 4)):
        if key in said and said[key] is None and isinstance(width, int):
            said[key] = usual * width
    if "head_dim" in said and said["head_dim"] is None and isinstance(width, int) and isinstance(heads, int):
        said["head_dim"] = width // heads
    rope = _rope(said.pop("rope_parameters", None) or said.pop("rope_scaling", None) or {})
    kinds = {part.get("rope_type", "default") for part in (rope, *rope.values()) if isinstance(part, Mapping)}
    said["rope_parameters"] = rope
    if kinds <= {"default"}:
        said = {key: value for key, value in said.items() if key not in _POSITIONS}
    if "sliding_attention" not in (said.get("layer_types") or ["sliding_attention"]):
        said = {key: value for key, value in said.items() if key not in _WINDOWS}
    return said


def _rope(table: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of rotary positions, of all layers or of each kind of them, without what is left as it is."""
    kept = {key: _rope(value) if isinstance(value, Mapping) else value for key, value in table.items()}
    return {key: value for key, value in kept.items() if value is not None and (key, value) not in _USUAL and key != "type"}
