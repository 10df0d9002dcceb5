"""``tessera-finetune merge``: an adapter joined with its base model, as a whole model again."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import torch

from checkpoint import Checkpoint, CheckpointError, Given, open_checkpoint
from checkpoint.disk.folder import Folder
from checkpoint.opening.recognise import locate
from checkpoint.opening.slices import read_stored
from checkpoint.readers import peft
from checkpoint.readers.hub import could_be_on_hub, find_on_hub
from finetune.base_model.hub import folder_of
from finetune.base_model.identity import candidates, find_again, recorded_beside
from finetune.data.tokenizer import usual_folder
from finetune.errors import ConfigError
from finetune.model.build import read_for, saved_config, stored_dtype, tied_names
from finetune.model.finite import check_finite, found_in
from finetune.output.folder import checkpoint_folder
from finetune.output.new_checkpoint import require_new, write_new
from finetune.output.saves import newest_first
from finetune.trained.export import check_model, tokenizer_files_of, write
from finetune.trained.merged_by_peft import merged_model

_log = logging.getLogger(__name__)
_ADAPTER = peft.CONFIG


def merge(
    adapter: Path,
    out: Path,
    *,
    base: Path | None = None,
    any_base: bool = False,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 2 << 30,
) -> Path:
    """Join an adapter with its base model into the new checkpoint ``out``; whole or absent.

    Each merged weight is computed in fp32 and rounded once. Of what serving opens, at most one tensor is in memory; what only
    peft merges is there as a whole.

    Args:
        adapter: a run's folder, a folder of checkpoints (of another trainer, too), or one folder with ``adapter_config.json``.
        base: the base model's folder; unset: the one that ``adapter_config.json`` names.
        any_base: join with that one even if the adapter was trained beside another.

    Raises:
        ConfigError: there is no adapter or no base, they do not fit, or ``out`` exists.
        RunError: writing failed.
    """
    out = require_new(out)
    folder = adapter_folder(adapter)
    if folder is None:
        raise ConfigError(f"{adapter}: holds no {_ADAPTER}; it is not an adapter")
    if not is_sum(folder):
        return _merge_by_peft(folder, out, base, dtype, any_base=any_base, max_shard_bytes=max_shard_bytes)
    try:
        with open_joined(folder, base, any_base=any_base) as checkpoint:
            check_model(checkpoint)
            dtype = dtype or stored_dtype(checkpoint)
            settings = {"max_shard_bytes": max_shard_bytes, "names": list(checkpoint.tensors)}
            return write(checkpoint, partial(read_for, checkpoint, dtype=dtype), out, dtype, settings, None)
    except CheckpointError as error:
        raise ConfigError(f"{folder}: {error}") from error


def _merge_by_peft(
    folder: Path, out: Path, base: Path | None, dtype: torch.dtype | None, *, any_base: bool, max_shard_bytes: int
) -> Path:
    with open_base(folder, base, any_base=any_base) as checkpoint:
        try:
            model = merged_model(checkpoint, folder, dtype)
        except CheckpointError as error:
            raise ConfigError(f"{checkpoint.path}: {error}") from error
        source = folder if (folder / "tokenizer.json").is_file() else usual_folder(checkpoint.tokenizer, str(checkpoint.path))
        tied = tied_names(model)
        return write_new(
            out,
            ((name, parameter.detach()) for name, parameter in model.named_parameters() if name not in tied),
            step=checkpoint.step or 0,
            config=saved_config(model.config, model.dtype),
            generation_config=dict(checkpoint.generation_config) or None,
            tokenizer_files=tokenizer_files_of(source),
            max_shard_bytes=max_shard_bytes,
        )


def is_sum(folder: Path) -> bool:
    """Whether the adapter in ``folder`` is added to its base's weights as they are read; of others peft makes the model.

    Raises:
        ConfigError: its description is not there or no JSON object.
    """
    try:
        return peft.why_not_added(Folder(folder).read_object(_ADAPTER)) is None
    except CheckpointError as error:
        raise ConfigError(f"{folder}: {error}") from error


def adapter_folder(path: Path) -> Path | None:
    """The adapter that counts of a run or of a folder of checkpoints, or ``path`` itself; ``None`` if that is no adapter.

    As of whole models, that is the one that ``latest`` names or, if it is not whole, the newest that is. Where none is whole,
    it is the first that would count, for what opens it to say what is wrong with it. Of another trainer's folders it is what
    that keeps as its newest, such as ``checkpoint-N``.
    """
    folder = checkpoint_folder(path)
    try:
        if not (folder / _ADAPTER).is_file():
            saves = newest_first(folder)
            folder = saves[0] if saves else locate(folder)
    except CheckpointError:
        return None
    try:
        return folder if (folder / _ADAPTER).is_file() and peft.recognises(Folder(folder)) else None
    except CheckpointError as error:
        raise ConfigError(f"{folder}: {error}") from error


def open_joined(folder: Path, base: Path | None = None, *, any_base: bool = False) -> Checkpoint:
    """The adapter in ``folder`` and its base model as one checkpoint, as serving opens it.

    Args:
        base, any_base: as of ``open_base``.

    Raises:
        CheckpointError: one of the two is not sound, or they do not fit.
        ConfigError: as ``open_base``.
        WeightNotFinite: a tensor of the adapter is not; with the base its name would not be told.
    """
    with open_base(folder, base, any_base=any_base) as found:
        given = Given(base=str(found.path), any_base=any_base)
    _check_adapter(folder)
    return open_checkpoint(folder, given=given)


def _check_adapter(folder: Path) -> None:
    weights = peft.open_weights(Folder(folder))
    try:
        with found_in(str(folder)):
            for name, stored in weights.places.items():
                check_finite(name, read_stored(weights.files, stored, None, dtype=None, device="cpu")[0])
    finally:
        weights.close()


def open_base(folder: Path, base: Path | None = None, *, any_base: bool = False) -> Checkpoint:
    """The base model of the adapter in ``folder``: at ``base``, or where the adapter says.

    Of a root above several checkpoints it is the one that the adapter was trained beside, known by its hash. Adapters of
    releases that recorded none get what the place means today, with a warning.

    Args:
        any_base: take what the place means today, whatever the adapter was trained beside.

    Raises:
        ConfigError: the adapter's description is at fault, there is no such model, or it is another one.
    """
    try:
        described = Folder(folder).read_object(_ADAPTER).get("base_model_name_or_path")
        wanted = None if any_base else recorded_beside(folder)
    except CheckpointError as error:
        raise ConfigError(f"{folder}: {error}") from error
    if base is None and (not isinstance(described, str) or not described):
        raise ConfigError(f"{folder / _ADAPTER}: names no base_model_name_or_path; name the base model with --base")
    named = folder / _ADAPTER if base is None else "--base"
    base = folder_of(base or _in_cache(str(described)), f"{named}: base model")
    try:
        places = candidates(base)
        found = places[0] if wanted is None else find_again(wanted, places)
        if found is None:
            remedy = "merge it with the place of that one as --base, or with --base-changed accept"
            raise ConfigError(f"{base}: is not the model that {folder} was trained beside, {wanted}; {remedy}")
        opened = open_checkpoint(found)
    except CheckpointError as error:
        raise ConfigError(f"{base}: {error}; name the base model with --base") from error
    if wanted is None and not any_base:
        _log.warning("%s does not say what its base model held; %s is taken for it, unproved", folder, opened.path)
    return opened


def _in_cache(name: str) -> str:
    """A base model that is named as one of the hub, where the hub's cache has it; else the name."""
    if Path(name).expanduser().exists() or not could_be_on_hub(name):
        return name
    try:
        return str(find_on_hub(name, fetch=False))
    except CheckpointError:
        return name  # of which the way to it is told
