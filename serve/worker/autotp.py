"""Tensor parallelism by DeepSpeed's AutoTP layers, on models without memory. The only deepspeed import of ``serve``."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, TypedDict

import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from serve.errors import ConfigError
from serve.model.families import Family, Rows
from serve.model.heads import HeadCut, Piece
from serve.model.localise import cut_by_hand, localise
from serve.model.shards import ShardOf

if TYPE_CHECKING:
    from deepspeed.module_inject.autotp_config import TPLayerSpec

_OPERATORS: Final = "__compatible_ops__"
"""Where DeepSpeed keeps which of its own operators can be built, once it has asked."""


def start_communication() -> None:
    """Let DeepSpeed's layers use the process group that exists already.

    Its shared-memory all-reduce stays off: its segments in /dev/shm outlive a killed rank, a frozen peer makes it spin for
    ever, and it has to be compiled first. So DeepSpeed finds here that none of its operators can be built, and runs no
    compiler to see.
    """
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    import deepspeed
    from deepspeed import ops

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    told: dict[str, Any] = vars(ops)
    known = told.get(_OPERATORS)
    told[_OPERATORS] = {}
    try:
        deepspeed.init_distributed(dist.get_backend(), auto_mpi_discovery=False, verbose=False)
    finally:
        del told[_OPERATORS]
        if known is not None:
            told[_OPERATORS] = known


def shard(
    model: PreTrainedModel, family: Family, heads: HeadCut, rank: int, size: int, group: dist.ProcessGroup | None
) -> Mapping[str, ShardOf]:
    """Replace the layers of a model on the ``meta`` device by DeepSpeed's sharded ones, still on ``meta``.

    Head and input embedding are cut along the vocabulary, so that no rank holds the largest tensors whole. Stacked experts stay
    as they are.

    Args:
        rank: which of the parts is wanted.
        size: how many there are.
        group: the ranks that have them; ``None`` where those are all.

    Returns:
        For each parameter name of the sharded model that a rank holds in part: which pieces of the whole are its own.

    Raises:
        ConfigError: the model cannot be cut like this.
    """
    from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META
    from deepspeed.module_inject.auto_tp import AutoTP
    from deepspeed.module_inject.autotp_config import AutoTPConfig
    from deepspeed.module_inject.layers import VocabParallelEmbedding

    by_hand = cut_by_hand(family, heads)
    group = group or dist.group.WORLD
    # DeepSpeed deals out whole key/value heads; where one is on several ranks, query heads are dealt out instead.
    counts = SimpleNamespace(num_key_value_heads=heads.unit, num_attention_heads=heads.query)
    try:
        auto = AutoTP(
            model,
            (),
            "",
            None,
            None,
            None,
            keep_module_on_host=True,
            partition_config=AutoTPConfig(
                tp_size=size, layer_specs=_specs(model, family, heads, by_hand), use_default_specs=False
            ),
            vocab_parallel_lm_head=True,
            model_config=counts,
            tp_grain_size=1,
            training_mode=False,
        )
        auto.set_tensor_parallel_config(size, group)
        auto.update_linear_policies()
        with _short_names():
            auto._replace_module(model)
        embedding = model.get_input_embeddings()
        if isinstance(embedding, nn.Embedding):  # not tied to the head, so AutoTP left it whole
            model.set_input_embeddings(VocabParallelEmbedding(embedding, group, name="input_embedding"))
    except (AssertionError, NotImplementedError, ValueError) as error:
        raise ConfigError(f"model.tensor_parallel_size is {size}; this model cannot be cut so: {error}") from error
    shards = {
        name: _pieces(getattr(parameter, DS_AUTOTP_UC_META), rank)
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if hasattr(parameter, DS_AUTOTP_UC_META)
    }
    return shards | localise(model, family, heads, by_hand, rank)


@contextlib.contextmanager
def _short_names() -> Iterator[None]:
    """Within, a module is written as its class alone: DeepSpeed looks for a word in each one's description, sixteen times."""
    whole = nn.Module.__repr__
    nn.Module.__repr__ = object.__repr__  # type: ignore[method-assign]  # put back below
    try:
        yield
    finally:
        nn.Module.__repr__ = whole  # type: ignore[method-assign]  # the class's own


def _specs(model: PreTrainedModel, family: Family, heads: HeadCut, by_hand: Rows) -> list[TPLayerSpec]:
    """What AutoTP cuts, and how."""
    from deepspeed.module_inject.autotp_config import PartitionType, TPLayerSpec

    def spec(names: Sequence[str], kind: PartitionType, **options: object) -> TPLayerSpec:
        patterns = [rf".*\b{re.escape(name)}\.weight$" for name in names]
        return TPLayerSpec(patterns=patterns, partition_type=kind, **options)

    joined = {name: kinds for name, kinds in family.rows.items() if len(kinds) > 1 and name not in by_hand}
    special = {*joined, *family.halves, *by_hand}
    specs = [spec(family.halves, PartitionType.COLUMN, shape=(2, -1), partition_dim=0)] if family.halves else []
    for name, kinds in joined.items():
        outputs, inputs = _shape_of(model, name)
        shape = (heads.widths(kinds, outputs), inputs)
        specs.append(spec((name,), PartitionType.COLUMN, shape=shape, partition_dim=0))
    row = list(family.row)
    if family.head_blocks > 1:
        joined_by, *row = row
        outputs, inputs = _shape_of(model, joined_by)
        widths = (inputs // family.head_blocks,) * family.head_blocks
        specs.append(spec((joined_by,), PartitionType.ROW, shape=(outputs, widths), partition_dim=1))
    specs.append(spec([name for name in family.column if name not in special], PartitionType.COLUMN))
    specs.append(spec(row, PartitionType.ROW))
    return specs


def _shape_of(model: nn.Module, name: str) -> tuple[int, int]:
    """(outputs, inputs) of the first linear layer whose path ends so: every layer's are the same."""
    module = next(module for path, module in model.named_modules() if path.endswith("." + name))
    outputs, inputs = module.get_parameter("weight").shape
    return outputs, inputs


class _Description(TypedDict):
    """What we read of DeepSpeed's own description of a shard (``DS_AUTOTP_UC_META``)."""

    original_shape: Sequence[int]
    replicated: bool
    partition_dim: int | None
    partition_sizes: Sequence[int]
    """Width of each rank's part."""
    sub_param_sizes: Sequence[int] | None
    """Widths of the fused parts, each of which is cut by itself; ``None`` where nothing is fused."""
    sub_param_shard_widths: Sequence[Sequence[int]]
    """The width of each rank's piece, for each fused part."""


def _pieces(meta: _Description, rank: int) -> ShardOf:
    """Read DeepSpeed's description of a shard."""
    full_shape = tuple(int(n) for n in meta["original_shape"])
    dim = meta["partition_dim"]
    if meta["replicated"] or dim is None:
        return ShardOf(full_shape=full_shape, dim=0, pieces=(Piece(0, full_shape[0]),))
    if meta["sub_param_sizes"]:
        pieces, offset = [], 0
        for size, widths in zip(meta["sub_param_sizes"], meta["sub_param_shard_widths"], strict=True):
            begin = offset + sum(widths[:rank])
            pieces.append(Piece(begin, begin + widths[rank]))
            offset += size
        return ShardOf(full_shape=full_shape, dim=int(dim), pieces=tuple(pieces))
    sizes = meta["partition_sizes"]
    begin = sum(sizes[:rank])
    return ShardOf(full_shape=full_shape, dim=int(dim), pieces=(Piece(begin, begin + sizes[rank]),))


def vocabulary_widths(vocab_size: int, size: int) -> tuple[int, ...]:
    """Rows of the head on each rank: DeepSpeed's own rule with a grain of one, the first ranks take the remainder."""
    return tuple(vocab_size // size + (rank < vocab_size % size) for rank in range(size))


def is_row_parallel(module: nn.Module) -> bool:
    """Whether a layer's products must be summed over the ranks before its bias is added."""
    return any(kind.__name__ in ("LinearAllreduce", "SubParamLinearAllreduce") for kind in type(module).__mro__)
