"""Writes a checkpoint: whole or not at all.

The order of the steps is the safety. Everything goes into a temporary folder beside the final one, every file flushed to disk,
the manifest last; then one rename makes the folder count, and ``latest`` is replaced, again by one rename. Stopped anywhere, a
root holds the checkpoints it held before, or those and the new one.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

import torch

from checkpoint.disk.durable import BeforeStep, Disk
from checkpoint.disk.latest import LATEST, step_folder_name
from checkpoint.disk.manifest import MANIFEST, FileEntry, Manifest
from checkpoint.dtypes import DTYPE_NAMES
from checkpoint.errors import CheckpointError
from checkpoint.layout import zero_size_rule
from checkpoint.model.config import CODE_NAMED, CONFIG, check_config
from checkpoint.writing.cut_shards import CutShardWriter
from checkpoint.writing.shards import HEADER_BYTES, INDEX, SINGLE, ShardWriter
from checkpoint.writing.workspace import TemporaryFolder, clear_leftovers

_NOTHING: Mapping[str, Any] = MappingProxyType({})
ADAPTER_CONFIG = "adapter_config.json"
_OWN_NAMES = ("config.json", "generation_config.json", ADAPTER_CONFIG, MANIFEST, SINGLE, INDEX)
_UNLIMITED = 1 << 62
_ADAPTER_HEADER_BYTES = 2 << 20
"""An adapter has many small tensors, and peft opens a single file."""
_ROOM = 1.2
"""Free space asked for, in times the bytes about to be written."""


class CheckpointWriter:
    """Writes ``<root>/step-XXXXXXXX/``, a plain transformers folder with a manifest, and points ``<root>/latest`` to it.

    Use as a context manager: commits at the end of the block, aborts if it raises. One process writes a checkpoint; not
    thread-safe. Saving a step that exists replaces it, and the old one counts until the new one is whole.

    Args:
        root: the folder above the step folders; made if absent.
        step: optimizer steps taken, from 0.
        config: ``config.json``; a transformers configuration's ``to_dict()``.
        adapter_config: ``adapter_config.json`` of peft. Given, the folder is one of peft's: it has this in place of
            ``config.json``, and its tensors, an adapter's, lie in ``adapter_model.safetensors``, never sharded.
        tokenizer_files: files to copy under their own names, for example ``tokenizer.json``.
        generation_config: ``generation_config.json``, if there shall be one.
        max_shard_bytes: a shard ends before the tensor that would make it larger.
        ranks: more than 1: in place of shards of whole tensors, one file for each of so many tensor-parallel ranks;
            see ``cut_shards``.
        names: of all tensors that will be added, if they are known: files for ranks are then smaller.
        extra: JSON values kept in the manifest.
        update_latest: whether ``latest`` shall name this checkpoint.
        expected_bytes: what the tensors will take in all, if known: asks at once for 1.2 times this as free space.
        before_step: called with the name of each step on disk before it is taken; for tests of what a crash leaves behind.

    Raises:
        CheckpointError: bad arguments, too little space, or a failing disk; nothing of the attempt is left then.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        step: int,
        config: Mapping[str, Any],
        adapter_config: Mapping[str, Any] | None = None,
        tokenizer_files: Iterable[Path] = (),
        generation_config: Mapping[str, Any] | None = None,
        max_shard_bytes: int = 2 << 30,
        ranks: int = 1,
        names: Collection[str] = (),
        extra: Mapping[str, Any] = _NOTHING,
        update_latest: bool = True,
        expected_bytes: int = 0,
        before_step: BeforeStep | None = None,
    ) -> None:
        if type(step) is not int or step < 0:
            raise ValueError(f"step is {step!r}; it must be an integer from 0 up")
        if max_shard_bytes < 1:
            raise ValueError(f"max_shard_bytes is {max_shard_bytes}; it must be at least 1")
        check_config(config)
        if CODE_NAMED in config:
            raise CheckpointError(CONFIG, f"has {CODE_NAMED}, which names code; what is written here comes with none")
        self._root = Path(root).absolute()
        self._step = step
        is_adapter = adapter_config is not None
        self._texts = {"config.json": _json("config.json", config)}
        if adapter_config is not None:
            self._texts = {ADAPTER_CONFIG: _json(ADAPTER_CONFIG, adapter_config)}
        if generation_config is not None:
            self._texts["generation_config.json"] = _json("generation_config.json", generation_config)
        self._tokenizer_files = _named(tokenizer_files)
        self._extra: Mapping[str, Any] = json.loads(_json(MANIFEST, extra))
        self._update_latest = update_latest
        self._added: set[str] = set()
        self._disk = Disk(before_step)
        self._disk.make_folders(self._root)
        clear_leftovers(self._root, self._disk)
        self._check_space(expected_bytes)
        self._temporary: TemporaryFolder | None = TemporaryFolder(self._root, step_folder_name(step), self._disk)
        self._shards: ShardWriter | CutShardWriter
        if ranks > 1:
            kind = str(config["model_type"])
            self._shards = CutShardWriter(self._temporary.path, self._disk, ranks=ranks, model_type=kind, names=names)
            return
        self._shards = ShardWriter(
            self._temporary.path,
            self._disk,
            max_shard_bytes=_UNLIMITED if is_adapter else max_shard_bytes,
            stem="adapter_model" if is_adapter else "model",
            header_bytes=_ADAPTER_HEADER_BYTES if is_adapter else HEADER_BYTES,
        )

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor, from any device, piece by piece; it may be changed or freed when this returns.

        Raises:
            CheckpointError: a name added before, an empty tensor, a dtype that is not kept, or a failing disk.
        """
        self._open()
        if name in self._added:
            raise CheckpointError(self._name, f"tensor {name!r} is added twice")
        if name == "__metadata__":
            raise CheckpointError(self._name, "no tensor can be called '__metadata__'; the format keeps that name for itself")
        if tensor.numel() == 0:
            raise CheckpointError(self._name, zero_size_rule(name, tuple(tensor.shape)))
        if tensor.dtype not in DTYPE_NAMES or tensor.layout != torch.strided or tensor.device.type == "meta":
            kind = f"{tensor.dtype}, {tensor.layout}, on {tensor.device}"
            raise CheckpointError(
                self._name, f"tensor {name!r} ({kind}) cannot be kept; dense {', '.join(DTYPE_NAMES.values())} can"
            )
        self._check_space(tensor.numel() * tensor.element_size())
        self._shards.add(name, tensor)
        self._added.add(name)

    def commit(self) -> Path:
        """Make the checkpoint count. Returns its folder."""
        temporary = self._open()
        if not self._added:
            raise CheckpointError(self._name, "has no tensor; a checkpoint has at least one")
        files, tensors = self._shards.finish()
        for name, text in self._texts.items():
            files[name] = self._disk.write_file(temporary.path / name, text)
        for name, source in self._tokenizer_files.items():
            files[name] = self._disk.copy_file(source, temporary.path / name)
        manifest = Manifest(step=self._step, files=_sorted(files), tensors=tensors, extra=self._extra)
        self._disk.write_file(temporary.path / MANIFEST, manifest.to_bytes())
        self._disk.flush_folder(temporary.path)
        folder = temporary.put_in_place()
        self._temporary = None
        if self._update_latest:
            self._point_latest(folder.name)
        return folder

    def abort(self) -> None:
        """Leave nothing of this checkpoint behind. After ``commit``, or twice, does nothing."""
        if self._temporary is not None:
            self._shards.close()
            self._temporary.discard()
            self._temporary = None

    @property
    def _name(self) -> str:
        return step_folder_name(self._step)

    def _open(self) -> TemporaryFolder:
        if self._temporary is None:
            raise ValueError(f"the writer of {self._name} has committed or aborted")
        return self._temporary

    def _check_space(self, num_bytes: int) -> None:
        free = shutil.disk_usage(self._root).free
        if free < _ROOM * num_bytes:
            rule = f"needs {_ROOM * num_bytes:.0f} bytes free ({_ROOM} times what is to be written); the disk has {free}"
            raise CheckpointError(self._name, rule)

    def _point_latest(self, name: str) -> None:
        """Replace ``latest`` in one step, and have that on disk."""
        temporary = self._root / f"{LATEST}.tmp-{uuid.uuid4().hex}"
        try:
            self._disk.write_file(temporary, f"{name}\n".encode())
            self._disk.rename(temporary, self._root / LATEST)
        except CheckpointError:
            temporary.unlink(missing_ok=True)
            raise
        self._disk.flush_folder(self._root)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is None and self._temporary is not None:
                self.commit()
        finally:
            self.abort()


def _json(file: str, value: Mapping[str, Any]) -> bytes:
    try:
        return (json.dumps(dict(value), indent=2, sort_keys=True) + "\n").encode()
    except (TypeError, ValueError) as error:
        raise CheckpointError(file, f"cannot be written as JSON: {error}") from error


def _named(files: Iterable[Path]) -> dict[str, Path]:
    """The tokenizer's files by the names they will have."""
    found: dict[str, Path] = {}
    for path in map(Path, files):
        if path.name in _OWN_NAMES or path.name in found:
            raise CheckpointError(
                path.name, "is given as a tokenizer file, but a checkpoint has its own file, or another, of this name"
            )
        if not path.is_file():
            raise CheckpointError(os.fspath(path), "is given as a tokenizer file; there is no such file")
        found[path.name] = path
    return found


def _sorted(files: dict[str, FileEntry]) -> dict[str, FileEntry]:
    return dict(sorted(files.items()))
