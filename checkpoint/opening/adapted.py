"""An adapter and its base model: where the base is, whether it is the one that was trained beside, and the two as one."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from checkpoint.disk.folder import Folder
from checkpoint.disk.manifest import MANIFEST, Manifest
from checkpoint.errors import CheckpointError, shown
from checkpoint.given import Given, with_recorded
from checkpoint.model.config import CONFIG, NOTHING_KNOWN
from checkpoint.opening.recognise import recognise
from checkpoint.opening.structure import Structure
from checkpoint.readers import peft
from checkpoint.readers.deepspeed.adapted import adapter_config
from checkpoint.readers.hub import HUB, could_be_on_hub, find_on_hub
from checkpoint.readers.surroundings import find_tokenizer
from checkpoint.readers.weights import Weights
from checkpoint.text.tokenizer_files import TOKENIZER_FILES

BASE_SAID = "--base, or model.base of a run"
"""How a user says where the base model is."""
_OF_ANY_LAYOUT = ("tokenizer", "neox_qkv_layout")
_ACCEPTED = "--base-changed accept, or model.base_changed of a run"
ANOTHER_BASE = f"name that one ({BASE_SAID}), or accept this one ({_ACCEPTED})"
"""What to do about an adapter that was trained beside another base model than the one here."""


def adapted_base(config: Mapping[str, Any], given: Given) -> str:
    """Where the base model of the adapter is that ``config``, its ``adapter_config.json``, describes.

    A name of the Hugging Face hub is its snapshot in the local cache; nothing is downloaded.

    Raises:
        CheckpointError: neither the user nor the adapter says so, or there is no such folder or snapshot.
    """
    base = given.base or config.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise CheckpointError(peft.CONFIG, f"names no base_model_name_or_path; name the base model's folder ({BASE_SAID})")
    where = BASE_SAID if given.base else peft.CONFIG
    try:
        folder_here = Path(base).expanduser()
        if folder_here.is_dir():
            return str(folder_here)
    except (OSError, RuntimeError, ValueError) as error:  # a name that is too long, or of a user there is none of
        raise CheckpointError(where, f"names the base model {shown(base)}, which is no path: {error}") from error
    why = "which is no folder here"
    if base.startswith(HUB) or (could_be_on_hub(base) and not given.base):
        revision = None if given.base else config.get("revision")  # of the base, not of the adapter
        try:
            return str(find_on_hub(f"{base}@{revision}" if revision and "@" not in base else base, fetch=False))
        except CheckpointError as error:
            why = f"which is no folder here, and as a model of the hub: {error.rule}"
    raise CheckpointError(where, f"names the base model {base!r}, {why}; name its folder ({BASE_SAID})")


def pinned(path: str | Path, given: Given) -> Given:
    """``given`` with the very folder of an adapter's base model, or of the adapter that is added: later saves change neither.

    Raises:
        CheckpointError: there is no such folder, or it is no checkpoint of a known layout.
    """
    folder, layout = recognise(path)
    refuse_two(folder, layout is peft, given)
    if layout is peft:
        base, _ = recognise(adapted_base(peft.read_config(folder), given))
        return dataclasses.replace(given, base=str(base.path))
    if given.adapter is not None:
        return dataclasses.replace(given, adapter=str(added_adapter(given.adapter).path))
    return dataclasses.replace(given, base=base_beside(folder, given))


def added_adapter(name: str) -> Folder:
    """The folder of the adapter that is to be added to a model; a name of the hub is its snapshot in the local cache.

    Raises:
        CheckpointError: there is no such folder or snapshot, or it is no adapter.
    """
    place = find_on_hub(name, "adapter", fetch=False) if name.startswith(HUB) else os.path.expanduser(name)
    folder, layout = recognise(place)
    if layout is not peft:
        raise CheckpointError(name, f"is a checkpoint of {layout.NAME}, no adapter")
    return folder


def refuse_two(folder: Folder, is_adapter: bool, given: Given) -> None:
    """Refuse an adapter that is to be added to another, and a base model beside the one in ``folder`` that one is added to."""
    if is_adapter and given.adapter is not None:
        raise CheckpointError(given.adapter, "would be a second adapter beside the one that is opened; there is one at a time")
    if given.adapter is not None and given.base is not None:
        raise CheckpointError(given.base, f"is given as an adapter's base model, which {folder.path} is: leave one of them out")


def refuse_base(folder: Folder, given: Given) -> None:
    """Refuse a base model for a whole one, which nothing says is an adapter: who names it takes ``folder`` for one."""
    if given.base is not None and adapter_config(folder, given) is None:
        raise CheckpointError(
            given.base, f"is given as an adapter's base model; {folder.path} has a whole model, and needs none"
        )


def base_beside(folder: Folder, given: Given) -> str | None:
    """The very folder of the base of a save that may hold an adapter alone.

    Where nothing names one that is here it is what was given, which is told of when it is opened.
    """
    config = adapter_config(folder, given)
    try:
        return given.base if config is None else str(recognise(adapted_base(config, given))[0].path)
    except CheckpointError:
        return given.base


def given_of_base(folder: Folder, manifest: Manifest | None, given: Given) -> Given:
    """What is said of the base of the adapter in ``folder``: ``given`` and, where that says nothing, what training was told.

    A tokenizer that was given to training is the adapter's own, a copy of it. Where another base is accepted, which may be of
    another layout, what is particular to files is not taken over: configuration, what tensors are called, which of them count.

    Args:
        manifest: the adapter's, of those that Tessera trained.
    """
    base = None if manifest is None else manifest.extra.get("base")
    recorded = base.get("given") if isinstance(base, dict) else None
    if not isinstance(recorded, dict):
        return given
    if given.any_base:
        recorded = {name: value for name, value in recorded.items() if name in _OF_ANY_LAYOUT}
    has_own = any(folder.has(name) for name in TOKENIZER_FILES)
    return with_recorded(given, recorded | ({"tokenizer": str(folder.path)} if has_own and "tokenizer" in recorded else {}))


@contextlib.contextmanager
def read_as_told(manifest: Manifest | None) -> Iterator[None]:
    """Faults of a base model tell what training was told of it, which may be gone by now.

    Args:
        manifest: the adapter's, of those that Tessera trained.
    """
    try:
        yield
    except CheckpointError as error:
        base = None if manifest is None else manifest.extra.get("base")
        told = base.get("given") if isinstance(base, dict) else None
        if not isinstance(told, dict) or not told:
            raise
        said = ", ".join(f"{name} {value}" for name, value in told.items())
        rule = f"{error.rule} (training was told: {said}; another base model is accepted by {_ACCEPTED})"
        raise CheckpointError(error.file, rule) from error


def joined(
    folder: Folder,
    adapter: Weights,
    below: Structure,
    given: Given,
    layout: str,
    manifest: Manifest | None = None,
    trained: Mapping[str, Any] = NOTHING_KNOWN,
) -> Structure:
    """The model ``below`` with ``adapter``, which is ``folder``'s, added; owns the files of both.

    Args:
        below: the base model, which is closed if this fails; the adapter's files then stay the caller's.
        layout: what the adapter's own layout is called.
        manifest: the adapter's, if it has one.
        trained: the configuration of the model that the adapter was saved in, as far as it is known.

    Raises:
        CheckpointError: the two do not fit, or ``manifest`` remembers another base model and ``given`` does not accept this
            one.
    """
    assert adapter.adapter is not None
    try:
        if manifest is not None and not given.any_base:
            _check_base(manifest, below)
        peft.check_biases(below.weights, adapter, adapter.adapter)
        weights = peft.merged(below.weights, adapter, adapter.adapter, below.config)
        _check_rows(weights, below.config, trained)
    except BaseException:
        below.close()
        raise
    own = find_tokenizer(folder, given, above=layout != peft.NAME)
    tokenizer = own if any(own.has(name) for name in TOKENIZER_FILES) else below.tokenizer
    model = {**below.config, **weights.changes}
    called = f"{layout} on {below.layout}"
    return Structure(
        *(folder, model, below.generation_config, None, weights, called, tokenizer, below.folder),
        given=below.given,
    )


def _check_rows(weights: Weights, base: Mapping[str, Any], trained: Mapping[str, Any]) -> None:
    """Refuse a save's adapter where the model that was saved had another vocabulary than this one.

    Args:
        weights: of the base, with the adapter added.
        base: the base's configuration.
        trained: what the save's own configuration says; empty where it has none.
    """
    rows = trained.get("vocab_size", base.get("vocab_size"))
    if "vocab_size" not in weights.changes and rows != base.get("vocab_size"):
        rule = f"vocab_size is {rows}; the base model has {base.get('vocab_size')}, and the save lacks the resized one's rows"
        raise CheckpointError(CONFIG, f"{rule}: open the adapter that was saved with its embedding and head")


def _check_base(manifest: Manifest, base: Structure) -> None:
    """The base that an adapter of Tessera remembers by its manifest is this one."""
    extra = manifest.extra.get("base")
    remembered: dict[str, Any] = extra if isinstance(extra, dict) else {}
    kind, _, digest = str(remembered.get("identity")).partition(":")
    if kind != "manifest":
        return
    if base.manifest is None or hashlib.sha256(base.manifest.to_bytes()).hexdigest() != digest:
        lacks = " (which has no manifest.json, by which it would be known)" if base.manifest is None else ""
        rule = f"remembers another base model than {base.folder.path}{lacks}; it was trained beside {remembered.get('folder')}"
        raise CheckpointError(MANIFEST, f"{rule}: {ANOTHER_BASE}")
