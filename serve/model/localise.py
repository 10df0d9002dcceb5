"""What tensor parallelism changes of a model beyond the layers that DeepSpeed cuts: parts by heads, and numbers of heads."""

from __future__ import annotations

import copy
from collections.abc import Iterable

from torch import nn
from transformers import PreTrainedModel

from serve.model.families import Family, Rows
from serve.model.heads import KEY, VALUE, HeadCut
from serve.model.shards import ShardOf


def cut_by_hand(family: Family, heads: HeadCut) -> Rows:
    """What of a family's ``rows`` DeepSpeed does not cut: what is no linear layer, and key/value heads that are repeated."""
    return {
        name: kinds
        for name, kinds in family.rows.items()
        if name not in family.column or (heads.repeats and any(kind in (KEY, VALUE) for kind in kinds))
    }


def attention_modules(model: nn.Module, family: Family) -> list[nn.Module]:
    """The attention module of every layer, in order: those at ``…layers.<number>.<family.attention>``."""
    return [module for name, module in model.named_modules() if _is_attention(name, family)]


def _is_attention(name: str, family: Family) -> bool:
    head, found, _ = name.rpartition("." + family.attention)
    return bool(found) and name.endswith("." + family.attention) and head.rpartition(".")[2].isdigit()


def localise(model: PreTrainedModel, family: Family, heads: HeadCut, by_hand: Rows, rank: int) -> dict[str, ShardOf]:
    """Make a model's attention that of one rank.

    Returns:
        For each parameter that is cut here: which pieces of the whole are this rank's.
    """
    for module in attention_modules(model, family):
        _set_numbers(module, family, heads, rank)
        _keep_own_norms(module, family, heads, rank)
    shards = {}
    for path, parameter in model.named_parameters():
        kinds = next((kinds for name, kinds in by_hand.items() if name in _places(path)), None)
        if kinds is not None:
            shape = tuple(parameter.shape)
            shards[path] = ShardOf(full_shape=shape, dim=0, pieces=heads.rows(kinds, shape[0], rank))
    return shards


def _places(path: str) -> Iterable[str]:
    """By what names a row may call a parameter: the end of its own path, or of its module's."""
    parts = path.split(".")
    ends = (parts, parts[:-1])
    return [".".join(end[-count:]) for end in ends for count in (1, 2) if len(end) >= count]


def _set_numbers(module: nn.Module, family: Family, heads: HeadCut, rank: int) -> None:
    """Numbers of heads and features that a forward reads: this rank's."""
    query, shared = heads.query_heads(rank).width, heads.shared_heads(rank).width
    for name in ("num_heads", "num_attention_heads"):
        if hasattr(module, name):
            setattr(module, name, query)
    for name in ("num_key_value_heads", "num_kv_heads", "kv_heads"):
        if hasattr(module, name):
            setattr(module, name, shared)
    for name in ("embed_dim", "split_size"):
        if hasattr(module, name):
            setattr(module, name, query * int(module.head_dim))  # type: ignore[arg-type]  # the family says that it is a number
    if family.local_config:
        module.config = copy.copy(module.config)
        module.config.num_attention_heads = query  # type: ignore[union-attr]  # every model has a configuration


def _keep_own_norms(module: nn.Module, family: Family, heads: HeadCut, rank: int) -> None:
    """Keep the norms of this rank's heads where each head has its own, under the numbers that the checkpoint has them by."""
    for name in family.norms_by_head:
        norms = getattr(getattr(module, name, None), "norms", None)
        if norms is None:
            continue
        own = heads.query_heads(rank) if len(norms) == heads.query else heads.shared_heads(rank)
        for key in list(norms._modules):
            if not own.begin <= int(key) < own.end:
                del norms._modules[key]
