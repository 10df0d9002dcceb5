"""Opens a checkpoint for reading: what ``prove`` found sound, and slices of its tensors."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

import torch

from checkpoint.disk.folder import Folder
from checkpoint.disk.manifest import Manifest, check_hashes, each_file
from checkpoint.dtypes import TORCH_DTYPES
from checkpoint.errors import CheckpointError
from checkpoint.given import NOTHING_GIVEN, Given
from checkpoint.layout import TensorInfo
from checkpoint.model import names
from checkpoint.model.stacks import stacked as stack_experts
from checkpoint.opening.agreement import check_tensors
from checkpoint.opening.identity import Identity, check_base, identity_of
from checkpoint.opening.leases import Leases
from checkpoint.opening.mapped import view_stored
from checkpoint.opening.prove import open_structure
from checkpoint.opening.slices import read_stored
from checkpoint.opening.structure import Structure, Verification
from checkpoint.text.vocabulary import check_rows, tokenizer_vocab_size

_NOTHING: Mapping[str, Any] = MappingProxyType({})


def open_checkpoint(
    path: str | Path, *, verify: Verification = "structure", given: Given = NOTHING_GIVEN, stacked: bool = False
) -> Checkpoint:
    """Open a checkpoint for reading.

    Args:
        path: a folder of any layout that ``checkpoint.opening.recognise`` knows, or one above: of several checkpoints in a
            folder that says which is the newest, that is taken.
        verify: ``structure`` proves that every file has its size and every tensor its place, reading headers only;
            ``sha256`` also reads every byte and compares it with the manifest, which must be there.
        given: what the files leave open; see ``Given``.
        stacked: experts that the files have one by one are given as the stacks that the model of transformers has, which is
            how they are trained.

    Returns:
        The checkpoint, whose files are open until ``close`` or the end of a ``with`` block. No tensor is read yet.

    Raises:
        CheckpointError: a file is missing, broken or not to be trusted; it names the file and the rule.
    """
    structure = open_structure(path, verify=verify, given=given)
    try:
        return Checkpoint(structure, stacked=stacked)
    except BaseException:
        structure.close()
        raise


class Checkpoint:
    """One checkpoint, open for reading; it never changes.

    Owns the descriptors of the weights files until ``close``, which waits for nobody: a read that is under way ends first.
    Any number of threads may read at once. Nothing of the tensors is kept in memory.
    """

    path: Path
    """The folder itself, links resolved."""
    config: Mapping[str, Any]
    """``config.json``."""
    generation_config: Mapping[str, Any]
    """``generation_config.json``; empty if there is none."""
    tensors: Mapping[str, TensorInfo]
    """Every stored tensor, by its stored name."""
    manifest: Manifest | None
    """``None`` for folders that Tessera did not write."""
    layout: str
    """What the layout of its files is called, such as ``Hugging Face``."""
    tokenizer: Folder
    """Where the tokenizer's files are, if there are any; not always in ``path``, nor under the usual names."""

    def __init__(self, structure: Structure, *, stacked: bool = False) -> None:
        """Takes the structure's open files over. ``stacked``: see ``open_checkpoint``."""
        weights = structure.weights
        if stacked:
            weights = dataclasses.replace(weights, places=stack_experts(weights.places, structure.config))
        self.path = structure.folder.path
        self.config = MappingProxyType(structure.config)
        self.generation_config = MappingProxyType(structure.generation_config)
        self.manifest = structure.manifest
        self.layout = structure.layout
        self.tokenizer = structure.tokenizer
        self.tensors = MappingProxyType(
            {
                name: TensorInfo(name, TORCH_DTYPES[stored.dtype], stored.shape, stored.file, adapted=stored.added is not None)
                for name, stored in weights.places.items()
            }
        )
        self._structure = structure
        self._weights = weights
        self._lock = threading.Lock()
        self._readers = 0
        self._closed = False
        self._bytes_read = 0

    @property
    def step(self) -> int | None:
        """Optimizer steps taken, by the manifest or by the layout's own files; ``None`` where neither says."""
        return self._weights.step if self.manifest is None else self.manifest.step

    @property
    def files(self) -> list[str]:
        """Names of the weights files, sorted; of those in folders below, the paths to them."""
        return sorted(self._weights.files)

    def way_to(self, file: str) -> Path:
        """A path by which one of ``files`` can be opened anew while the checkpoint is open, whatever folder it is in."""
        return Path(f"/dev/fd/{self._weights.files[file]}")

    @property
    def is_adapted(self) -> bool:
        """Whether this is an adapter with its base model, as one."""
        return self._structure.base is not None

    @property
    def parts(self) -> str:
        """Which folder its tensors are from, for messages; of an adapter with its base model both."""
        base = self._structure.base
        return str(self.path) if base is None else f"{base.path} with the adapter {self.path}"

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors read from the files so far."""
        return self._bytes_read

    @property
    def tokenizer_vocab_size(self) -> int | None:
        """One more than the tokenizer's largest id, added tokens included; ``None`` if there is no tokenizer.

        Raises:
            CheckpointError: the tokenizer's file is broken. It is read when first asked for.
        """
        return None if self._tokenizer is None else self._tokenizer[1]

    @cached_property
    def _tokenizer(self) -> tuple[str, int] | None:
        return tokenizer_vocab_size(self._structure.tokenizer)

    def resolve(self, name: str, tied: Mapping[str, str] = _NOTHING) -> str:
        """The stored name of the model's tensor ``name``.

        Args:
            tied: alias to owner; where the tensor itself is absent, one that it is tied to answers for it.

        Raises:
            CheckpointError: the checkpoint has no such tensor.
        """
        stored = names.find_tied(name, self.tensors, tied)
        if stored is None:
            raise CheckpointError(self._weights.table, f"has no tensor {name!r}")
        return stored

    def read(
        self,
        name: str,
        index: tuple[slice, ...] | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Read ``tensor[index]``, and no byte besides, into a new contiguous tensor or into ``out``.

        Args:
            name: the model's name or the stored one; see ``resolve``.
            index: slices of step 1, at most one for each dimension; dimensions without one are taken whole.
            dtype: a floating-point dtype to cast to; ``None`` keeps the stored one.
            device: where the new tensor is.
            out: what to fill instead of a new tensor, of the slice's shape and with any strides; cast to its dtype.

        Returns:
            The new tensor, or ``out``.

        Raises:
            CheckpointError: no such tensor; an integer tensor asked for as floating point; the file cannot be read.
            ValueError: ``index``, ``dtype`` or ``out`` is not as described, or the checkpoint is closed.
        """
        info = self.tensors[self.resolve(name)]
        if out is not None:
            dtype, device = out.dtype, out.device
        if dtype is not None and dtype != info.dtype:
            if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
                raise ValueError(f"dtype is {dtype}; tensors are cast to floating point only")
            if not info.dtype.is_floating_point:
                raise CheckpointError(info.file, f"tensor {info.name!r} holds {info.dtype}; weights must be floating point")
        with self._reading():
            place = self._weights.places[info.name]
            out, num_bytes = read_stored(self._weights.files, place, index, dtype=dtype, device=device, out=out)
        with self._lock:
            self._bytes_read += num_bytes
        return out

    def view(
        self, name: str, index: tuple[slice, ...] | None = None, *, dtype: torch.dtype, leases: Leases | None = None
    ) -> torch.Tensor | None:
        """``tensor[index]`` of two dimensions as it lies in its file, mapped: nothing is copied.

        Its pages have been fetched and count as memory of the process until the last tensor over them is gone, which may be
        after ``close``; where memory is short they are fetched again. What is written to the file meanwhile is seen, and a file
        that is cut ends the process that looks behind its new end: so use it for a moment, with a lease, or give it memory of
        its own with ``keep`` of ``checkpoint.opening.mapped``.

        Args:
            name, index: as of ``read``.
            dtype: what it must be stored in.
            leases: where a lease on the file goes, so that who wants to write to it waits until it is given back.

        Returns:
            A tensor that nobody may write to, the numbers of each row side by side; ``None`` where the slice does not lie in
            one piece, or not as ``dtype``, or has to be computed, or somebody has the file open for writing when a lease is
            asked for: then ``read`` it.

        Raises:
            CheckpointError: no such tensor; the file ends early.
            ValueError: ``index`` is not as described, or the checkpoint is closed.
        """
        info = self.tensors[self.resolve(name)]
        with self._reading():
            found = view_stored(self._weights.files, self._weights.places[info.name], index, dtype, leases)
        if found is not None:
            with self._lock:
                self._bytes_read += found.numel() * found.itemsize
        return found

    def identity(self) -> Identity:
        """What the checkpoint is known by wherever it lies.

        Raises:
            CheckpointError: a file cannot be read.
        """
        return identity_of(self._structure)

    @property
    def given(self) -> Given:
        """What was said of the model's own files when it was opened: of an adapter's base, of those."""
        return self._structure.given

    def check_base(self, given: Given = NOTHING_GIVEN) -> None:
        """Refuse an adapter of Tessera beside another base than it was trained beside, by the files of one without a manifest.

        Args:
            given: what the checkpoint was opened with.

        Raises:
            CheckpointError: it is another base; says which it was.
        """
        check_base(self._structure, given)

    def look_through(self, look: Callable[[str], None], *, hashes: bool) -> None:
        """Have ``look`` called with the name of every weights file, in several threads; raises what it raises.

        Args:
            hashes: first compare the bytes of every file of the checkpoint with the manifest, which must be there. A file is
                looked at right after its own bytes, so that it is seldom fetched from the disk a second time.

        Raises:
            CheckpointError: a hash does not hold, there is none, or a file cannot be read.
        """

        def look_at_weights(name: str) -> None:
            if name in self._weights.files:
                look(name)

        if hashes:
            check_hashes(self._structure.folder, self.manifest, look_at_weights)
        else:
            each_file(self._weights.files, look)

    def check_model(self) -> None:
        """Refuse a ``config.json`` of which no model shall be made, before one is built.

        Raises:
            CheckpointError: it names more layers than there are tensors, or a token id without a row in the vocabulary.
        """
        self._structure.check_model()

    def check_tensors(self, expected: Mapping[str, tuple[int, ...]], *, tied: Mapping[str, str] = _NOTHING) -> None:
        """Refuse weights that are not those of the model that ``config.json`` describes.

        Args:
            expected: every tensor the model has, by the model's names, and its whole shape as stored.
            tied: alias to owner. One of them may be absent; where both are stored they must be equal, which reads them.

        Raises:
            CheckpointError: a tensor is missing, unexpected, of another shape, or not floating point, or tied ones differ.
        """
        check_tensors(self, expected, tied, self._weights)

    def check_tokenizer(self, rows: int) -> None:
        """Refuse a tokenizer with ids beyond the ``rows`` of the embedding.

        Raises:
            CheckpointError: it has such ids, or its file is broken.
        """
        check_rows(self._tokenizer, rows)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Keeps the descriptors open while a read is under way, so that none is closed and used again under it."""
        with self._lock:
            if self._closed:
                raise ValueError(f"the checkpoint {self.path} is closed")
            self._readers += 1
        try:
            yield
        finally:
            with self._lock:
                self._readers -= 1
                last = self._closed and self._readers == 0
            if last:
                self._weights.close()

    def close(self) -> None:
        """Give the files back; reading after this is an error. May be called again."""
        with self._lock:
            last = not self._closed and self._readers == 0
            self._closed = True
        if last:
            self._weights.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, model_type={self.config['model_type']!r}, {len(self.tensors)} tensors)"
