"""``tessera-finetune merge``: an adapter joined with its base model, as a whole model again."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from checkpoint import Checkpoint, CheckpointError, open_checkpoint
from checkpoint.disk.folder import Folder
from checkpoint.disk.manifest import load_manifest
from checkpoint.given import NOTHING_GIVEN, Given
from checkpoint.opening.adapted import ANOTHER_BASE, adapted_base, given_of_base, read_as_told
from checkpoint.opening.recognise import locate
from checkpoint.opening.slices import read_stored
from checkpoint.readers import peft
from finetune.base_model.hub import folder_of
from finetune.base_model.identity import candidates, difference_from, find_again, kept_below, recorded_beside
from finetune.errors import ConfigError
from finetune.model.build import read_for, stored_dtype
from finetune.model.finite import check_finite, found_in
from finetune.output.folder import checkpoint_folder
from finetune.output.new_checkpoint import require_new
from finetune.output.saves import newest_first
from finetune.trained.export import check_model, write

_log = logging.getLogger(__name__)
_ADAPTER = peft.CONFIG


def merge(
    adapter: Path,
    out: Path,
    *,
    given: Given = NOTHING_GIVEN,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 2 << 30,
) -> Path:
    """Join an adapter with its base model into the new checkpoint ``out``; whole or absent.

    Each merged weight is computed in fp32 and rounded once. At most one tensor is in memory.

    Args:
        adapter: a run's folder, a folder of checkpoints (of another trainer, too), or one folder with ``adapter_config.json``.
        given: what the files leave open, such as the base model's folder: unset, it is the one that ``adapter_config.json``
            names.

    Raises:
        ConfigError: there is no adapter or no base, they do not fit, or ``out`` exists.
        RunError: writing failed.
    """
    out = require_new(out)
    adapter = folder_of(adapter, "merge", "adapter")
    if not adapter.is_dir():
        raise ConfigError(f"{adapter}: there is no such folder")
    folder = adapter_folder(adapter)
    if folder is None:
        raise ConfigError(f"{adapter}: holds no {_ADAPTER}; it is not an adapter")
    try:
        with open_joined(folder, given) as checkpoint:
            check_model(checkpoint)
            dtype = dtype or stored_dtype(checkpoint)
            settings = {"max_shard_bytes": max_shard_bytes, "names": list(checkpoint.tensors)}
            return write(checkpoint, partial(read_for, checkpoint, dtype=dtype), out, dtype, settings, None)
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


def open_joined(folder: Path, given: Given = NOTHING_GIVEN, *, stacked: bool = False) -> Checkpoint:
    """The adapter in ``folder`` and its base model as one checkpoint, as serving opens it.

    The base is at ``given.base``, or where the adapter says. Of a root above several checkpoints it is the one that the adapter
    was trained beside, known by its hash. Adapters that recorded none get what the place means today, with a warning.

    Args:
        given: what the files leave open; with ``any_base`` what the place means today is taken, whatever the adapter was
            trained beside.
        stacked: see ``open_checkpoint``.

    Raises:
        CheckpointError: one of the two is not sound or not of a kind that is read, or they do not fit.
        ConfigError: there is no base, or it is another one.
        WeightNotFinite: a tensor of the adapter is not; with the base its name would not be told.
    """
    config = peft.read_config(Folder(folder))
    wanted = None if given.any_base else recorded_beside(folder)
    place = Path(adapted_base(config, given)) if given.base is None else folder_of(given.base, "--base: base model")
    try:
        places = candidates(place)
        own = replace(given_of_base(Folder(folder), load_manifest(Folder(folder)), given), base=None)
        found = places[0] if wanted is None else find_again(wanted, [*places, *kept_below(place, wanted)], own)
        if found is None and len(places) == 1:
            with read_as_told(load_manifest(Folder(folder))):
                open_checkpoint(places[0], given=own).close()  # which says why, if it is no other
    except CheckpointError as error:
        where = "" if error.file == str(place) else f"{place}: "
        remedy = "" if given.base else "; name the base model with --base"
        raise ConfigError(f"{where}{error}{remedy}") from error
    if found is None:
        assert wanted is not None
        other = difference_from(wanted, places[0], own)
        raise ConfigError(f"{place}: is not the model that {folder} was trained beside, {wanted}: {other}; {ANOTHER_BASE}")
    if wanted is None and not given.any_base:
        _log.warning("%s does not say what its base model held; %s is taken for it, unproved", folder, found)
    _check_adapter(folder)
    return open_checkpoint(folder, given=replace(given, base=str(found)), stacked=stacked)


def _check_adapter(folder: Path) -> None:
    weights = peft.open_weights(Folder(folder))
    try:
        with found_in(str(folder)):
            for name, stored in weights.places.items():
                check_finite(name, read_stored(weights.files, stored, None, dtype=None, device="cpu")[0])
    finally:
        weights.close()
