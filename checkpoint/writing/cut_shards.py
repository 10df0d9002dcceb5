"""Writes a checkpoint's tensors cut for a number of tensor-parallel ranks, so that each reads one file from begin to end.

The files are those of torch.distributed.checkpoint's safetensors writer: parts of tensors, and in each header where a part
begins in its tensor (``readers.dcp.hf``). Any number of ranks can read them; that which they are cut for reads them in order.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

import torch

from checkpoint.disk.durable import Disk
from checkpoint.disk.manifest import FileEntry, TensorEntry
from checkpoint.dtypes import DTYPE_NAMES
from checkpoint.errors import CheckpointError
from checkpoint.writing.shards import ShardWriter

_HEADER_BYTES = 4 << 20
"""Room where it is not known which tensors there will be: one file has a part of each, and some ten thousand fit."""
_PAGE_BYTES = 4 << 10
_ENTRY_BYTES = 512
"""What a tensor takes in a header beside its name: type, sizes, offsets, where its part begins."""
_UNLIMITED = 1 << 62

_ROW_PARALLEL = frozenset(("o_proj", "down_proj", "dense", "dense_4h_to_h", "out_proj", "c_proj", "fc_out", "fc2"))
"""Modules whose weight [out, in] is cut by its inputs: those whose outputs the ranks add up."""
_CONV1D = frozenset(("c_attn", "c_fc", "c_proj"))
"""Modules of GPT-2, stored as [in, out]."""
_WHOLE = frozenset(("wpe", "embed_positions"))


def cut_dim(model_type: str, name: str, shape: tuple[int, ...]) -> int | None:
    """The dimension by which ranks share a tensor; ``None`` for one that each of them holds whole.

    Args:
        name: the model's name for it.
    """
    module, _, end = name.rpartition(".")
    last = module.rpartition(".")[2]
    if len(shape) == 2 and end == "weight" and last not in _WHOLE:
        dim = 1 if last in _ROW_PARALLEL else 0
        return 1 - dim if model_type == "gpt2" and last in _CONV1D else dim
    if len(shape) == 1 and end == "bias" and last not in _ROW_PARALLEL and "norm" not in last and not last.startswith("ln_"):
        return 0
    return None


class CutShardWriter:
    """Writes the tensors of one checkpoint cut for ranks, into one file for each rank. What is not cut is in the first."""

    def __init__(self, folder: Path, disk: Disk, *, ranks: int, model_type: str, names: Collection[str] = ()) -> None:
        """
        Args:
            names: of all tensors that will be added, if they are known: each rank reads the headers of all files, in which no
                more room is kept than these take.
        """
        self._folder, self._disk, self._model_type = folder, disk, model_type
        room = _room_for(names) if names else _HEADER_BYTES
        self._writers = [
            ShardWriter(folder, disk, max_shard_bytes=_UNLIMITED, stem=f"rank-{rank}", header_bytes=room)
            for rank in range(ranks)
        ]
        self._tensors: dict[str, TensorEntry] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Append each rank's part of a tensor to its file."""
        shape = tuple(tensor.shape)
        dim = cut_dim(self._model_type, name, shape)
        parts = (tensor,) if dim is None else torch.tensor_split(tensor, len(self._writers), dim)
        reached = 0
        for writer, part in zip(self._writers, parts, strict=False):
            if part.numel() == 0:
                break  # of a tensor with fewer rows than ranks
            writer.add(name, part, tuple(reached if d == dim else 0 for d in range(len(shape))))
            reached += 0 if dim is None else part.shape[dim]
        self._tensors[name] = TensorEntry(DTYPE_NAMES[tensor.dtype], shape, _file(1))

    def finish(self) -> tuple[dict[str, FileEntry], dict[str, TensorEntry]]:
        """End every file and give it its name.

        Returns:
            what was written: files by name, tensors by name.

        Raises:
            CheckpointError: the tensors are more than a header has room for.
        """
        files: dict[str, FileEntry] = {}
        for rank, writer in enumerate(self._writers, start=1):
            written = writer.finish()[0]
            if len(written) > 1:
                raise CheckpointError(_file(rank), f"cannot hold a part of {len(self._tensors)} tensors: its header is full")
            for name, entry in written.items():
                self._disk.rename(self._folder / name, self._folder / _file(rank))
                files[_file(rank)] = entry
        return files, self._tensors

    def close(self) -> None:
        """Give up the open files."""
        for writer in self._writers:
            writer.close()


def _room_for(names: Collection[str]) -> int:
    """Bytes that a header with a part of each of these tensors takes at most, in whole pages.

    A name stands in it twice, the second time in JSON of JSON.
    """
    each = (_ENTRY_BYTES + len(json.dumps(name)) + len(json.dumps(json.dumps(name))) for name in names)
    return _PAGE_BYTES * (1 + -(-sum(each) // _PAGE_BYTES))


def _file(rank: int) -> str:
    return f"shard-{rank:05d}-model-00001-of-00001.safetensors"
