"""From the names that a training script gave its tensors to those of the model of transformers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from checkpoint.errors import CheckpointError, shown
from checkpoint.layout import Stored
from checkpoint.model.config import attention_heads, key_value_heads

_TITAN_PARTS: Mapping[str, str] = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_TITAN_ENDS: Mapping[str, str] = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "lm_head.weight": "lm_head.weight",
}


_TITAN_MODELS = {"llama": "Llama 3", "qwen3": "Qwen 3"}
"""Families of transformers whose tensors torchtitan has by other names and in no other form."""
_QWEN_PARTS: Mapping[str, str] = {"attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"}
_TITAN_UNREAD = (
    (".moe.", "a mixture of experts (Llama 4, Qwen 3 MoE, DeepSeek V3, GPT-OSS)"),
    (".attention.wkv_a.", "latent attention (DeepSeek V3)"),
    (".attention.wq_a.", "latent attention (DeepSeek V3)"),
    (".attention.sinks", "attention with sinks (GPT-OSS)"),
    (".sa_norm.", "torchtune's layers"),
    ("vision_encoder.", "a model that sees"),
    (".lora_a.", "torchtitan's LoRA, an adapter that is not joined here"),
)
"""Parts of names, and what has them."""


def is_torchtitan(names: Collection[str]) -> bool:
    """Whether these are the names of torchtitan's (and Meta's) models."""
    return "tok_embeddings.weight" in names


def without_buffers(names: Mapping[str, str]) -> dict[str, str]:
    """These without the angles that torchtitan of before 0.2 saves, complex numbers that its models compute anew."""
    return {name: key for name, key in names.items() if name.rpartition(".")[2] != "freqs_cis"}


def from_torchtitan(places: Mapping[str, Stored], config: Mapping[str, Any] | None, table: str) -> dict[str, Stored]:
    """torchtitan's Llama 3 and Qwen 3 by the names of transformers, the rows of q and k in its order.

    torchtitan's Llama rotates neighbouring rows of a head together, transformers the first half with the second: row r of a
    head of d rows is torchtitan's row 2 · (r mod d/2) + r div d/2. Its Qwen rotates as transformers does.

    Args:
        config: the model's ``config.json``, which alone says how many heads there are.

    Raises:
        CheckpointError: there is none, it is of another family, or a tensor's shape or name does not fit it.
    """
    for part, what in _TITAN_UNREAD:
        other = next((name for name in places if part in f".{name}"), None)
        if other is not None:
            raise CheckpointError(table, f"holds tensor {other!r} of {what}, which is not read by torchtitan's names")
    if config is None:
        rule = "has torchtitan's names, and says nothing of heads; give the model's config.json (--model-config)"
        raise CheckpointError(table, rule)
    model = _TITAN_MODELS.get(str(config.get("model_type")))
    if model is None:
        told = " and ".join(_TITAN_MODELS.values())
        rule = f"has torchtitan's names, which are read for {told}; config.json is of {shown(config.get('model_type'))}"
        raise CheckpointError(table, rule)
    parts = {**_TITAN_PARTS, **_QWEN_PARTS} if model == "Qwen 3" else _TITAN_PARTS
    order = _as_they_are if model == "Qwen 3" else _halves
    heads, groups = attention_heads(config), key_value_heads(config)
    if heads is None or groups is None:
        raise CheckpointError("config.json", "must have num_attention_heads: rows of torchtitan's q and k are ordered by heads")
    found: dict[str, Stored] = {}
    for name, stored in places.items():
        if name in _TITAN_ENDS:
            found[_TITAN_ENDS[name]] = stored
            continue
        _, _, inside = name.partition("layers.")
        number, _, rest = inside.partition(".")
        part, _, end = rest.replace("attention.qkv_linear.", "attention.").rpartition(".")
        if not name.startswith("layers.") or not number.isdecimal():
            raise CheckpointError(table, f"holds tensor {name!r}, which torchtitan's {model} does not have")
        layer = f"model.layers.{number}"
        if part == "attention.wqkv":
            found |= {
                f"{layer}.{key}.{end}": value for key, value in _split_fused(name, stored, heads, groups, table, order).items()
            }
        elif part in parts:
            count = {"attention.wq": heads, "attention.wk": groups}.get(part)
            found[f"{layer}.{parts[part]}.{end}"] = (
                stored if count is None else stored.picked(order(_starts(name, stored, count, table)))
            )
        else:
            raise CheckpointError(table, f"holds tensor {name!r}, which torchtitan's {model} does not have")
    return found


def _starts(name: str, stored: Stored, count: int, table: str) -> list[range]:
    """The rows of each of ``count`` heads."""
    rows = stored.shape[0] if stored.shape else 0
    if not rows or rows % count or (rows // count) % 2:
        raise CheckpointError(table, f"tensor {name!r} has {rows} rows, which are not {count} heads of an even size")
    size = rows // count
    return [range(at, at + size) for at in range(0, rows, size)]


def _halves(heads: Sequence[range]) -> list[range]:
    """For each head its even rows, then its odd ones."""
    return [head[parity::2] for head in heads for parity in (0, 1)]


def _as_they_are(heads: Sequence[range]) -> list[range]:
    return list(heads)


def _split_fused(
    name: str, stored: Stored, heads: int, groups: int, table: str, order: Callable[[Sequence[range]], list[range]]
) -> dict[str, Stored]:
    """Rows that lie as, for each key/value head, its queries' heads, its key's and its value's."""
    each = heads // groups
    all_heads = _starts(name, stored, groups * (each + 2), table)
    inside = [all_heads[at : at + each + 2] for at in range(0, len(all_heads), each + 2)]
    return {
        "self_attn.q_proj": stored.picked(order([head for group in inside for head in group[:each]])),
        "self_attn.k_proj": stored.picked(order([group[each] for group in inside])),
        "self_attn.v_proj": stored.picked([group[each + 1] for group in inside]),
    }
