"""``tessera-finetune export``: a checkpoint written elsewhere as one plain folder, in any dtype, tensor by tensor."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from checkpoint import Checkpoint, CheckpointError, Given, TensorInfo, open_checkpoint
from checkpoint.disk.folder import Folder
from checkpoint.disk.step_names import step_in_name
from checkpoint.dtypes import dtype_name
from checkpoint.given import NOTHING_GIVEN
from checkpoint.text.tokenizer_files import TOKENIZER_FILES
from checkpoint.writing.cut_shards import cut_dim
from finetune.base_model.hub import folder_of
from finetune.data.tokenizer import usual_folder
from finetune.errors import ConfigError
from finetune.model.build import config_from, meta_model, read_for, shapes_of, tied_names
from finetune.model.finite import check_finite, found_in
from finetune.output.folder import RESUME, checkpoint_folder, step_folders
from finetune.output.new_checkpoint import require_new, write_new

_log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Told the bytes of tensors that are written, and of all of them, after each."""


def export(
    source: Path,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    step: int | None = None,
    max_shard_bytes: int = 2 << 30,
    ranks: int = 1,
    given: Given = NOTHING_GIVEN,
    progress: Progress | None = None,
) -> Path:
    """Write a checkpoint to the new folder ``out``; it appears whole or not at all.

    From a run's folder, ``float32`` takes the optimizer's exact weights of that step where they are still kept.
    At most one tensor is in memory.

    Args:
        source: a run's folder, a folder of checkpoints, or one checkpoint of any layout that is opened; or an adapter, whose
            base model is written with it.
        dtype: of the written weights; unset: as stored.
        step: which of several checkpoints; unset: the latest.
        ranks: more than 1: cut for so many tensor-parallel ranks; see ``checkpoint.writing.cut_shards``.
        given: what the source's files leave open.

    Raises:
        ConfigError: there is no such checkpoint, its tensors are not those of the model that its configuration describes, one
            is not finite in ``dtype``, or ``out`` exists already.
        RunError: writing failed.
    """
    out = require_new(out)
    source = folder_of(source, "export")
    try:
        with open_checkpoint(_choose(source, step), given=given) as checkpoint:
            checkpoint.check_base(given)
            check_model(checkpoint)
            _check_ranks(checkpoint, ranks)
            exact = _exact_weights(source, checkpoint) if dtype == torch.float32 and given == NOTHING_GIVEN else None
            settings: dict[str, Any] = {"max_shard_bytes": max_shard_bytes, "ranks": ranks, "names": list(checkpoint.tensors)}
            if exact is None:
                read = checkpoint.read if dtype is None else partial(read_for, checkpoint, dtype=dtype)
                return write(checkpoint, read, out, dtype, settings, progress)
            with exact:
                return write(checkpoint, lambda name: exact.read(f"master.{name}"), out, dtype, settings, progress)
    except CheckpointError as error:
        raise ConfigError(f"{source}: {error}") from error


def _choose(source: Path, step: int | None) -> Path:
    folder = checkpoint_folder(source)
    if step is None:
        return folder
    steps = dict(step_folders(folder)) or _steps_of_trainers(folder)
    if step not in steps:
        there = ", ".join(map(str, sorted(steps))) or "none"
        raise ConfigError(f"{source}: has no checkpoint of step {step}; there are {there}")
    return steps[step]


def _steps_of_trainers(folder: Path) -> dict[int, Path]:
    """The folders that trainers name by a step, in this one or in torchtitan's of them.

    Raises:
        ConfigError: two have the name of one step.
        CheckpointError: one is a link that leads elsewhere.
    """
    found: dict[int, Path] = {}
    for place in (folder, folder / "checkpoint"):
        for path in sorted(place.iterdir()) if place.is_dir() else ():
            step = step_in_name(path)
            if step is None or not path.is_dir():
                continue
            if step in found:
                raise ConfigError(f"{folder}: {found[step].name} and {path.name} are both of step {step}; name one of them")
            found[step] = Folder(place).below(path.name).path
    return found


def check_model(checkpoint: Checkpoint) -> None:
    """Refuse a source that lacks tensors of its model: transformers would fill what is missing with random numbers.

    Raises:
        CheckpointError: a tensor is missing, of another shape, or none of the model's.
    """
    checkpoint.check_model()
    rows = checkpoint.config.get("vocab_size")
    try:
        if isinstance(rows, int):
            checkpoint.check_tokenizer(rows)
    except CheckpointError as error:
        _log.warning("the tokenizer is not of this model, which is not served with it: %s", error)
    if any(".experts." in name for name in checkpoint.tensors):
        return  # the model of transformers keeps in one tensor what checkpoints keep expert by expert
    try:
        model = meta_model(config_from(checkpoint.config, checkpoint.path))
    except ConfigError as error:
        _log.warning("that no tensor is missing is not proved: %s", error)
        return
    checkpoint.check_tensors(shapes_of(model), tied=tied_names(model))


def _check_ranks(checkpoint: Checkpoint, ranks: int) -> None:
    """Refuse more ranks than there can be parts of any tensor: some would have an empty file."""
    kind = str(checkpoint.config["model_type"])
    cut = ((info.shape, cut_dim(kind, name, info.shape)) for name, info in checkpoint.tensors.items())
    most = max((shape[dim] for shape, dim in cut if dim is not None), default=1)
    if ranks > most:
        raise ConfigError(f"tensor_parallel_size is {ranks}; the longest side that tensors are cut along is {most}")


def _exact_weights(source: Path, checkpoint: Checkpoint) -> Checkpoint | None:
    """The resume state of the same step of the same run, if it holds exactly this checkpoint's tensors."""
    if not (source / RESUME).is_dir() or checkpoint.step is None:
        return None
    folder = dict(step_folders(source / RESUME)).get(checkpoint.step)
    if folder is None:
        return None
    state = open_checkpoint(folder)
    if all(f"master.{name}" in state.tensors for name in checkpoint.tensors):
        return state
    state.close()
    return None


def write(
    checkpoint: Checkpoint,
    read: Callable[[str], torch.Tensor],
    out: Path,
    dtype: torch.dtype | None,
    settings: dict[str, Any],
    progress: Progress | None,
) -> Path:
    config = dict(checkpoint.config)
    if dtype is not None:
        config.pop("torch_dtype", None)
        config["dtype"] = dtype_name(dtype)

    def stored_bytes(info: TensorInfo) -> int:
        return math.prod(info.shape) * (dtype if dtype is not None and info.dtype.is_floating_point else info.dtype).itemsize

    sizes = {name: math.prod(info.shape) * info.dtype.itemsize for name, info in checkpoint.tensors.items()}

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        done, total = 0, sum(sizes.values())
        for name in checkpoint.tensors:
            tensor = read(name)
            written = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
            with found_in(checkpoint.parts):
                check_finite(name, written, tensor)
            yield name, written
            done += sizes[name]
            if progress is not None:
                progress(done, total)

    return write_new(
        out,
        tensors(),
        step=checkpoint.step or 0,
        config=config,
        generation_config=dict(checkpoint.generation_config) or None,
        tokenizer_files=tokenizer_files_of(usual_folder(checkpoint.tokenizer, str(checkpoint.path))),
        expected_bytes=sum(map(stored_bytes, checkpoint.tensors.values())),
        **settings,
    )


def tokenizer_files_of(folder: Path) -> tuple[Path, ...]:
    """The files of a folder that belong to its tokenizer."""
    return tuple(folder / name for name in TOKENIZER_FILES if (folder / name).is_file())
