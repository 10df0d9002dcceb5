"""A decoder's tensors by what they do, and the names and forms that the models of transformers have for them.

Trainers with tensor parallelism keep queries, keys and values of a layer in one tensor, each in an order of its own. A reader
takes that apart into heads; here the heads become what a family of transformers has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from checkpoint.layout import Stored
from checkpoint.readers.ranks import Part, by_rows, transposed

Tensors = Mapping[str, Stored]
"""A layer's tensors by ``weight`` and ``bias``."""
Rows = Mapping[str, list[Part]]
"""A linear map's tensors by ``weight`` and ``bias``, each as stretches of rows in the order of the whole."""

FAMILIES = ("gpt_neox", "gpt2", "llama", "mistral")
"""Model types whose names are known here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer; ``weight`` of a linear map is [out, in]."""

    norm: Tensors
    """Before attention."""
    mlp_norm: Tensors
    query: Rows
    """A stretch for each head, or for several in order; so ``key`` and ``value``."""
    key: Rows
    value: Rows
    out: Tensors
    up: Rows
    gate: Rows = field(default_factory=dict)
    """What goes through the activation and multiplies ``up``; empty where ``up`` itself does."""
    down: Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """All tensors of a model, by what they are for, whatever names its trainer gave them."""

    embedding: Stored
    positions: Stored | None = None
    """Learned ones."""
    layers: tuple[Layer, ...]
    norm: Tensors
    head: Stored | None = None
    """``None`` where it is the embedding."""


def named(model: Decoder, family: str) -> dict[str, Stored]:
    """The tensors by the names of a family of transformers, in its forms.

    Args:
        family: one of ``FAMILIES``, that has what the model has.
    """
    outer, each = {"gpt_neox": (_NEOX, _neox_layer), "gpt2": (_GPT2, _gpt2_layer)}.get(family, (_LLAMA, _llama_layer))
    found = {f"{outer.embedding}.weight": model.embedding}
    if model.positions is not None:
        found[f"{outer.positions}.weight"] = model.positions
    for number, layer in enumerate(model.layers):
        found |= {f"{outer.layers}.{number}.{name}": stored for name, stored in each(layer).items()}
    found |= _under(outer.norm, model.norm)
    if model.head is not None:
        found["lm_head.weight"] = model.head
    return found


@dataclass(frozen=True, slots=True)
class _Outer:
    embedding: str
    positions: str
    layers: str
    norm: str


_NEOX = _Outer("gpt_neox.embed_in", "", "gpt_neox.layers", "gpt_neox.final_layer_norm")
_GPT2 = _Outer("transformer.wte", "transformer.wpe", "transformer.h", "transformer.ln_f")
_LLAMA = _Outer("model.embed_tokens", "", "model.layers", "model.norm")


def _under(name: str, tensors: Tensors) -> dict[str, Stored]:
    return {f"{name}.{kind}": stored for kind, stored in tensors.items()}


def _rows(name: str, rows: Rows) -> dict[str, Stored]:
    return {f"{name}.{kind}": by_rows(parts, name) for kind, parts in rows.items()}


def _neox_layer(layer: Layer) -> dict[str, Stored]:
    """Queries, keys and values alternate by head."""
    heads = {
        kind: [part for one in zip(layer.query[kind], layer.key[kind], layer.value[kind], strict=True) for part in one]
        for kind in layer.query
    }
    return {
        **_under("input_layernorm", layer.norm),
        **_under("post_attention_layernorm", layer.mlp_norm),
        **_rows("attention.query_key_value", heads),
        **_under("attention.dense", layer.out),
        **_rows("mlp.dense_h_to_4h", layer.up),
        **_under("mlp.dense_4h_to_h", layer.down),
    }


def _gpt2_layer(layer: Layer) -> dict[str, Stored]:
    """All queries, then all keys, then all values; matrices are [in, out]."""
    heads = {kind: [*layer.query[kind], *layer.key[kind], *layer.value[kind]] for kind in layer.query}
    found = {
        **_rows("attn.c_attn", heads),
        **_under("attn.c_proj", layer.out),
        **_rows("mlp.c_fc", layer.up),
        **_under("mlp.c_proj", layer.down),
    }
    turned = {name: transposed(stored) for name, stored in found.items()}
    return {**_under("ln_1", layer.norm), **_under("ln_2", layer.mlp_norm), **turned}


def _llama_layer(layer: Layer) -> dict[str, Stored]:
    return {
        **_under("input_layernorm", layer.norm),
        **_under("post_attention_layernorm", layer.mlp_norm),
        **_rows("self_attn.q_proj", layer.query),
        **_rows("self_attn.k_proj", layer.key),
        **_rows("self_attn.v_proj", layer.value),
        **_under("self_attn.o_proj", layer.out),
        **_rows("mlp.gate_proj", layer.gate),
        **_rows("mlp.up_proj", layer.up),
        **_under("mlp.down_proj", layer.down),
    }
