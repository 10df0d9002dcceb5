"""The training sources as Megatron's ``.bin`` and ``.idx``, with labels beside them where not every token is a target."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from finetune.data.prepared import Prepared
from finetune.data.readers.megatron import labels_of, write_megatron
from finetune.data.shards import ShardTokens, lengths_of
from finetune.data.targets import IGNORE_INDEX

_LONGEST_UINT16 = 65_500
"""Ids from which Megatron's own tools write int32."""


def write_prepared(prepared: Prepared, prefix: Path) -> int:
    """Write every document of the training sources once, in order; returns how many.

    ``PREFIX_label`` is written when some tokens are no targets: the ids again, ``IGNORE_INDEX`` where they are not.
    """
    folders = [Path(shard) for shard in prepared.train_shards]
    tokens = ShardTokens(folders, prepared.dtype)
    dtype = "uint16" if prepared.num_ids < _LONGEST_UINT16 else "int32"
    count = write_megatron(prefix, (ids for ids, _ in _documents(folders, tokens)), dtype=dtype)
    labels = labels_of(Path(f"{prefix}.idx")).with_suffix("")
    if prepared.targets < prepared.tokens:
        write_megatron(labels, (_labels(ids, mask) for ids, mask in _documents(folders, tokens)), dtype="int32")
    else:
        for suffix in (".bin", ".idx"):  # of an earlier export under this name
            labels.with_suffix(suffix).unlink(missing_ok=True)
    return count


def _documents(folders: list[Path], tokens: ShardTokens) -> Iterator[tuple[NDArray[np.int64], NDArray[np.uint8] | None]]:
    for shard, folder in enumerate(folders):
        begin = 0
        for length in lengths_of(folder).tolist():
            yield tokens.read(shard, begin, begin + length)
            begin += length


def _labels(ids: NDArray[np.int64], mask: NDArray[np.uint8] | None) -> NDArray[np.int64]:
    return ids.astype(np.int64) if mask is None else np.where(mask, ids.astype(np.int64), IGNORE_INDEX)
