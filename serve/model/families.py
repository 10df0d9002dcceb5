"""What Tessera must know of each architecture: where tensor parallelism cuts it, and how its attention is reached.

The model definitions are transformers'. One row of ``FAMILIES`` per ``model_type``; a new family is a new row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from serve.errors import ConfigError

if TYPE_CHECKING:  # this table is also read where neither torch nor transformers shall be imported
    from transformers import PretrainedConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture's facts.

    ``column`` and ``row`` name linear layers by the end of their module path. A column-parallel layer keeps some of its
    output features on each rank, a row-parallel one some of its input features; the ranks' products are summed after it.
    """

    name: str
    column: tuple[str, ...]
    row: tuple[str, ...]
    fused_thirds: tuple[str, ...] = ()
    """Column-parallel layers whose output rows are [all q | all k | all v]: each third is cut by itself."""
    conv1d: bool = False
    """Linear layers are transformers' ``Conv1D``: stored as [in, out]."""
    activated: tuple[str, str] = ("", "")
    """The linear layer of the feed-forward part that an activation follows at once, and that activation's name beside it."""
    rotary_function: str = ""
    """What the attention's forward calls to turn queries and keys: (q, k, cosines, sines), halves of the features paired."""
    attention: str = "self_attn"
    """End of the path of each layer's attention module."""
    replaces_attn: bool = False
    """The module computes attention in its own ``_attn`` and does not go through transformers' attention interface."""
    scaled: bool = True
    """With ``replaces_attn``: whether scores are divided by the square root of the head size."""


_SEPARATE_QKV: Final = ("q_proj", "k_proj", "v_proj")
_ROTARY: Final = "apply_rotary_pos_emb"
_MOST_RANKS: Final = 1024

FAMILIES: Final[Mapping[str, Family]] = {
    family.name: family
    for family in (
        # Rows of query_key_value are [head, (q, k, v), head_dim]: a plain cut by heads keeps each head's triple together.
        Family(
            name="gpt_neox",
            column=("query_key_value", "dense_h_to_4h"),
            row=("attention.dense", "dense_4h_to_h"),
            attention="attention",
            activated=("mlp.dense_h_to_4h", "act"),
            rotary_function=_ROTARY,
        ),
        Family(
            name="gpt2",
            column=("attn.c_attn", "mlp.c_fc"),
            row=("attn.c_proj", "mlp.c_proj"),
            fused_thirds=("attn.c_attn",),
            conv1d=True,
            activated=("mlp.c_fc", "act"),
            attention="attn",
        ),
        Family(
            name="gptj",
            column=(*_SEPARATE_QKV, "mlp.fc_in"),
            row=("out_proj", "mlp.fc_out"),
            activated=("mlp.fc_in", "act"),
            attention="attn",
            replaces_attn=True,
        ),
        Family(
            name="gpt_neo",
            column=(*_SEPARATE_QKV, "mlp.c_fc"),
            row=("out_proj", "mlp.c_proj"),
            activated=("mlp.c_fc", "act"),
            attention="attn.attention",
            replaces_attn=True,
            scaled=False,
        ),
        Family(name="opt", column=(*_SEPARATE_QKV, "fc1"), row=("out_proj", "fc2"), activated=("fc1", "activation_fn")),
        *(
            Family(
                name=name,
                column=(*_SEPARATE_QKV, "gate_proj", "up_proj"),
                row=("o_proj", "down_proj"),
                activated=("mlp.gate_proj", "act_fn"),
                rotary_function=_ROTARY,
            )
            for name in ("llama", "mistral", "qwen2")
        ),
        Family(
            name="phi",
            column=(*_SEPARATE_QKV, "mlp.fc1"),
            row=("self_attn.dense", "mlp.fc2"),
            activated=("mlp.fc1", "activation_fn"),
            rotary_function=_ROTARY,
        ),
    )
}


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a checkpoint's ``config.json``.

    Raises:
        ConfigError: the architecture is not one that Tessera serves.
    """
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise ConfigError(f"config.json: model_type is {model_type!r}; Tessera serves {', '.join(sorted(FAMILIES))}")
    return FAMILIES[str(model_type)]


def key_value_heads(config: PretrainedConfig) -> int:
    """Key/value heads of the whole model; families without grouped queries have as many as query heads."""
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def head_dim(config: PretrainedConfig) -> int:
    """Features of one head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def attention_window(config: PretrainedConfig, layer: int) -> int:
    """Positions a GPT-Neo layer sees, itself included; 0 for all. Other families pass their window with each call."""
    kinds = getattr(config, "attention_layers", None)
    return int(config.window_size) if kinds is not None and kinds[layer] == "local" else 0


def check_tensor_parallel(query: int, shared: int, size: int) -> None:
    """Refuse a tensor-parallel size that would split one of ``query`` heads, or of ``shared`` key/value heads.

    Raises:
        ConfigError: names the sizes that work.
    """
    if query % size or shared % size:
        allowed = [n for n in range(1, min(query, _MOST_RANKS) + 1) if query % n == 0 and shared % n == 0]
        raise ConfigError(
            f"model.tensor_parallel_size is {size}; it must divide the model's {query} query heads and {shared} key/value "
            f"heads: {', '.join(map(str, allowed))}"
        )


def check_max_model_len(wanted: int | None, limit: int) -> int:
    """Positions a sequence may have: what is wanted, or all that the model has.

    Raises:
        ConfigError: the model has fewer.
    """
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
        if config.model_type != "gpt_neox" and (turned % 2 or (turned != width and config.model_type != "phi")):
            raise ConfigError(
                f"config.json: partial_rotary_factor is {factor:g}; {config.model_type} with heads of {width} features cannot "
                f"turn {turned} of them"
            )
    check_rope_type(rope)
