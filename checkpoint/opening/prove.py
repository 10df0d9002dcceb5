"""Refuses what cannot be trusted in a checkpoint's folder, by headers and configuration alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpoint.disk.folder import Folder
from checkpoint.disk.manifest import MANIFEST, Manifest, check_descriptions, check_hashes, check_sizes, load_manifest
from checkpoint.disk.step_names import step_in_name
from checkpoint.errors import CheckpointError
from checkpoint.given import NOTHING_GIVEN, Given
from checkpoint.layout import Stored
from checkpoint.model.config import CONFIG
from checkpoint.model.mxfp4 import decoded
from checkpoint.model.quantised import check_not_quantised
from checkpoint.opening.adapted import adapted_base, added_adapter, given_of_base, joined, read_as_told, refuse_base, refuse_two
from checkpoint.opening.recognise import MASTERS_READ, recognise
from checkpoint.opening.structure import CODE, Structure, Verification
from checkpoint.readers import hf, peft
from checkpoint.readers.dcp import distcp
from checkpoint.readers.dcp import hf as dcp_hf
from checkpoint.readers.deepspeed.adapted import of_model, with_adapter
from checkpoint.readers.surroundings import checked_configs, config_file, find_configs, find_tokenizer, names_code, read_configs
from checkpoint.readers.weights import Weights

_NO_BASE = "is an adapter too; an adapter's base model must be a whole one"

_REPLACED = "was replaced by another save while it was being opened; open it again"


def open_structure(path: str | Path, *, verify: Verification = "structure", given: Given = NOTHING_GIVEN) -> Structure:
    """Prove a checkpoint sound, all but the match of its tensors with the model of ``config.json``, which takes that model.

    Args:
        path, verify, given: as for ``open_checkpoint``.

    Raises:
        CheckpointError: a file is missing, broken or not to be trusted; it names the file and the rule.
    """
    if verify not in ("structure", "sha256"):
        raise ValueError(f"verify is {verify!r}; it must be 'structure' or 'sha256'")
    return _opened(path, verify, given)


def _opened(path: str | Path, verify: Verification, given: Given, *, is_base: bool = False) -> Structure:
    """``open_structure``; with ``is_base`` of an adapter's base model, which may be no adapter."""
    folder, layout = recognise(path)
    if layout is peft and is_base:
        raise CheckpointError(str(path), _NO_BASE)
    refuse_two(folder, layout is peft, given)
    if layout is peft:
        return _open_adapted(folder, adapted_base(peft.read_config(folder), given), given, verify)
    if given.adapter is not None:
        return _open_adapted(added_adapter(given.adapter), str(folder.path), given, verify)
    above = layout is not hf
    identity = folder.identity()
    manifest = load_manifest(folder)
    if manifest is not None:
        check_sizes(folder, manifest)
        check_descriptions(folder, manifest)
    if verify == "sha256":
        check_hashes(folder, manifest)
    configs = find_configs(folder, given, above=above)
    tokenizer = find_tokenizer(folder, given, above=above)
    code = {CODE: "named by auto_map of config.json, and never run"} if names_code(folder, given, above=above) else {}
    weights = layout.open_weights(folder, given)
    try:
        if layout is hf and (given.prefix is not None or manifest is None):  # what we write ourselves is what its names say
            weights = of_model(weights, folder, given)
        elif layout in (distcp, dcp_hf) and manifest is None:
            weights = with_adapter(weights, folder, given)
        if weights.adapter is not None:
            if is_base:
                raise CheckpointError(str(path), _NO_BASE)
            if given.master_weights and layout not in MASTERS_READ:
                _refuse_without_masters(weights, layout.NAME)
            if folder.identity() != identity:
                raise CheckpointError(str(path), _REPLACED)
            # What the names begin with, masters and the adapter's description are of the save; its base was not trained.
            own = dataclasses.replace(given, prefix=None, adapter_config=None, master_weights=False)
            trained = {} if configs is None or given.config is not None else configs[0]
            base = adapted_base(weights.adapter, given)
            return joined(folder, weights, _open_base(base, own, verify), own, layout.NAME, trained=trained)
        refuse_base(folder, given)
        if given.master_weights and layout not in MASTERS_READ:
            _refuse_without_masters(weights, layout.NAME)
        if configs is not None:
            places = decoded(weights.places, configs[0])
            weights = dataclasses.replace(weights, places=places, facts={**weights.facts, **code})
        check_not_quantised(weights.places, folder, weights.table)
        config, generation = configs or checked_configs(
            folder, weights.config, weights.table, weights.config_sought, above=above
        )
        if manifest is not None:
            _check_table(manifest, weights.places)
        if folder.identity() != identity:
            raise CheckpointError(str(path), _REPLACED)
    except BaseException:
        weights.close()
        raise
    config = {**config, **weights.changes}
    place = weights.tokenizer or tokenizer
    return Structure(folder, config, generation, manifest, weights, layout.NAME, place, given=given)


def _open_adapted(folder: Folder, base: str, given: Given, verify: Verification) -> Structure:
    """The model at ``base`` with the adapter in ``folder`` added, whose folder and tokenizer, if it has one, count.

    Raises:
        CheckpointError: one of the two is not sound, they do not fit, or the adapter remembers another base model.
    """
    config = peft.read_config(folder)
    manifest = load_manifest(folder)
    if manifest is not None:
        check_sizes(folder, manifest)
        check_descriptions(folder, manifest)
        if verify == "sha256":
            check_hashes(folder, manifest)
    adapter = peft.open_weights(folder)
    try:
        if manifest is not None:
            _check_table(manifest, adapter.places)
        step = step_in_name(folder.path) if manifest is None else manifest.step
        adapter = dataclasses.replace(adapter, step=step, adapter=config)
        own = given_of_base(folder, manifest, given)
        with read_as_told(manifest):
            below = _open_base(base, own, verify)
        return joined(folder, adapter, below, given, peft.NAME, manifest)
    except BaseException:
        adapter.close()
        raise


def _open_base(base: str, given: Given, verify: Verification) -> Structure:
    """The model at ``base``, of which ``given`` holds as far as it does not speak of adapters.

    Raises:
        CheckpointError: it is not sound, or an adapter itself.
    """
    return _opened(base, verify, dataclasses.replace(given, base=None, adapter=None), is_base=True)


def model_config(path: str | Path, given: Given = NOTHING_GIVEN) -> tuple[dict[str, Any], Path]:
    """The checked ``config.json`` of a checkpoint whose weights need not be there, and where that was read, for messages.

    Returns:
        The configuration; the file it is in or, where the weights' own files tell it, the checkpoint's folder.

    Raises:
        CheckpointError: there is none, or it breaks a rule.
    """
    path = Path(path)
    if (path / CONFIG).is_file() and given.config is None and not (path / peft.CONFIG).is_file():
        folder, layout = Folder(path), None
    else:
        folder, layout = recognise(path)
    file = config_file(folder, given, above=layout is not None and layout is not hf)
    if file is not None and layout is not peft and given.adapter is None:  # an adapter may resize the vocabulary
        return read_configs(Folder(file.parent), file.name)[0], file
    with open_structure(folder.path, given=given) as structure:
        return structure.config, folder.path


def tokenizer_place(path: str | Path, given: Given = NOTHING_GIVEN) -> Folder:
    """Where the tokenizer is that belongs to a checkpoint; in a folder of Hugging Face's, weights need not be there.

    Raises:
        CheckpointError: there is no such checkpoint.
    """
    is_whole = given.adapter is None and not (Path(path) / peft.CONFIG).is_file()
    if (Path(path) / CONFIG).is_file() and given.tokenizer is None and is_whole:
        return Folder(Path(path))
    folder, layout = recognise(path)
    if layout is hf and given.adapter is None:
        return find_tokenizer(folder, given, above=False)
    with open_structure(folder.path, given=given) as structure:
        return structure.tokenizer


def _refuse_without_masters(weights: Weights, layout: str) -> None:
    """Refuse weights in the type of training where masters were asked for; what was trained in fp32 is its own master."""
    for name, stored in weights.places.items():
        if stored.dtype in ("BF16", "F16"):
            rule = (
                f"keeps {name!r} in {stored.dtype}; of this layout ({layout}) no fp32 master weights are read: name "
                "DeepSpeed's own save of ZeRO, where there is one, or leave --master-weights (model.master_weights) out"
            )
            raise CheckpointError(stored.file, rule)


def _check_table(manifest: Manifest, places: Mapping[str, Stored]) -> None:
    """The manifest's tensors are those of the files."""
    for name, stored in places.items():
        file = stored.file
        entry = manifest.tensors.get(name)
        if entry is None or file not in manifest.files:
            raise CheckpointError(file, f"holds tensor {name!r}, which {MANIFEST} does not list")
        if (entry.dtype, entry.shape, entry.file) != (stored.dtype, stored.shape, file):
            raise CheckpointError(file, f"tensor {name!r} has another dtype, shape or file than {MANIFEST} says")
    for name, entry in manifest.tensors.items():
        if name not in places:
            raise CheckpointError(entry.file, f"does not hold tensor {name!r}, which {MANIFEST} lists")
