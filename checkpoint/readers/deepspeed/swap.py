"""Finds what ZeRO-3 with an optimizer on NVMe leaves in swap files, which a save copies beside the ranks' files.

``offloaded_tensors/rankNN/A_B.tensor.swp`` holds the fp32 elements of one sub-group, padded to whole blocks; A and B are the
numbers of its first and last parameter, counted in the order in which the model made them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from checkpoint.disk.folder import Folder
from checkpoint.errors import CheckpointError
from checkpoint.layout import DTYPE_BYTES
from checkpoint.readers.deepspeed.saves import Saved, Stretch
from checkpoint.readers.weights import OpenFiles

FOLDER = "offloaded_tensors"
_SWAP = re.compile(r"(\d+)_(\d+)\.tensor\.swp")
_PADDING_BYTES = 1 << 20
"""Files are whole blocks: 1,024 bytes for each thread that writes."""


class Swapped:
    """The swap files of all ranks of one save."""

    def __init__(self, folder: Folder, files: OpenFiles, first: Saved, sub_groups: Sequence[tuple[list[str], int]]) -> None:
        """
        Args:
            first: the model file of rank 0.
            sub_groups: names and elements on each rank, in the order of a rank's vector.
        """
        self._folder, self._files, self._first, self._sub_groups = folder, files, first, sub_groups
        shared, buffers = first.table("shared_params"), first.get("buffer_names") or ()
        order = [name for name in first.tensors("module") if name not in shared and name not in buffers]
        self._numbers = {name: number for number, name in enumerate(order)}

    def stretch(self, rank: int, number: int, count: int, dtype: str) -> Stretch:
        """Sub-group ``number`` of the ``count`` of ``rank``.

        Raises:
            CheckpointError: its swap file is missing, cut short, or cannot be told from others.
        """
        if count != len(self._sub_groups):
            rule = f"calls for {len(self._sub_groups)} sub-groups; rank {rank} has {count}, some of them in swap files"
            raise CheckpointError(self._first.file, rule)
        names, elements = self._sub_groups[number]
        place = f"{FOLDER}/rank{rank:02d}"
        file = f"{place}/{self._choose(rank, names, elements * DTYPE_BYTES[dtype])}"
        held = os.fstat(self._files[file]).st_size
        if held < elements * DTYPE_BYTES[dtype]:
            raise CheckpointError(file, f"is cut short: it holds {held} bytes of the sub-group's {elements} {dtype} elements")
        return Stretch(file, dtype, 0, elements)

    def _choose(self, rank: int, names: Sequence[str], num_bytes: int) -> str:
        """The swap file of the sub-group of ``names``: by its parameters' numbers, else the only one of its size."""
        if not self._folder.has(FOLDER):
            rule = (
                f"is missing: rank {rank} had {names[0]!r} on NVMe, which a save copies there; copy it too from where the save "
                "was written: nothing else has these weights"
            )
            raise CheckpointError(FOLDER, rule)
        below = self._folder.below(FOLDER).below(f"rank{rank:02d}")
        found = [name for name in below.names() if _SWAP.fullmatch(name)]
        expected = f"{self._numbers.get(names[0], -1)}_{self._numbers.get(names[-1], -1)}.tensor.swp"
        sized = [name for name in found if 0 <= (below.path / name).stat().st_size - num_bytes < _PADDING_BYTES]
        if expected in sized or (expected in found and not sized):
            return expected
        if len(sized) != 1:
            held = ", ".join(found) or "none"
            rule = f"must have one swap file of {num_bytes} bytes or {expected}, for {names[0]!r}; it has {held}"
            raise CheckpointError(f"{FOLDER}/rank{rank:02d}", rule)
        return sized[0]
