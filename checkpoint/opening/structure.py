"""Refuses what cannot be trusted in a checkpoint's folder, by headers and configuration alone."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from checkpoint.disk.folder import Folder
from checkpoint.disk.manifest import MANIFEST, Manifest, check_hashes, check_sizes, load_manifest
from checkpoint.disk.step_names import step_in_name
from checkpoint.errors import CheckpointError
from checkpoint.given import NOTHING_GIVEN, Given
from checkpoint.layout import Stored
from checkpoint.model.config import CONFIG, check_vocabulary, layers, shown
from checkpoint.model.mxfp4 import decoded
from checkpoint.model.quantised import check_not_quantised
from checkpoint.opening.recognise import MASTERS_READ, recognise
from checkpoint.readers import hf, peft
from checkpoint.readers.dcp import distcp
from checkpoint.readers.dcp import hf as dcp_hf
from checkpoint.readers.deepspeed.adapted import adapter_config, of_model, with_adapter
from checkpoint.readers.hub import HUB, could_be_on_hub, find_on_hub
from checkpoint.readers.surroundings import (
    checked_configs,
    config_file,
    find_configs,
    find_tokenizer,
    names_code,
    read_configs,
)
from checkpoint.readers.weights import Weights
from checkpoint.text.tokenizer_files import TOKENIZER_FILES

Verification = Literal["structure", "sha256"]

CODE = "code in the folder"
"""Among the facts of weights whose configuration names code: that there is some, and that it is left alone."""

ADAPTED = " on "
"""What stands between the names of an adapter's layout and of its base model's."""

NOTHING_KNOWN: Mapping[str, Any] = {}

_NO_BASE = "is an adapter too; an adapter's base model must be a whole one"

_REPLACED = "was replaced by another save while it was being opened; open it again"


@dataclass(frozen=True, slots=True)
class Structure:
    """A checkpoint whose files were found sound, before any tensor is read. Owns the weights files' descriptors."""

    folder: Folder
    config: dict[str, Any]
    generation_config: dict[str, Any]
    manifest: Manifest | None
    """``None`` for folders that Tessera did not write."""
    weights: Weights
    layout: str
    """What the layout of the weights' files is called."""
    tokenizer: Folder
    """Where the tokenizer's files are, if there are any."""

    def check_model(self) -> None:
        """Refuse a ``config.json`` of which no model shall be made: before one is built.

        Raises:
            CheckpointError: it has more layers than there are tensors, so that building it could take minutes; or a token id
                that no row of the vocabulary belongs to.
        """
        count, held = layers(self.config), len(self.weights.places)
        if count is not None and count > held:
            raise CheckpointError(CONFIG, f"gives the model {count} layers; {self.weights.table} has {held} tensors in all")
        check_vocabulary(self.config, self.generation_config)

    def close(self) -> None:
        """Close the weights files."""
        self.weights.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


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
    _refuse_two(layout is peft, given)
    if layout is peft:
        return open_adapted(folder, adapted_base(peft.read_config(folder), given), given, verify)
    if given.adapter is not None:
        adapter, kind = recognise(given.adapter)
        if kind is not peft:
            raise CheckpointError(given.adapter, f"is a checkpoint of {kind.NAME}, no adapter")
        return open_adapted(adapter, str(folder.path), given, verify)
    above = layout is not hf
    identity = folder.identity()
    manifest = load_manifest(folder)
    if manifest is not None:
        check_sizes(folder, manifest)
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
            return _on_base(folder, weights, base, own, verify, layout.NAME, trained=trained)
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
    return Structure(folder, config, generation, manifest, weights, layout.NAME, weights.tokenizer or tokenizer)


def adapted_base(config: Mapping[str, Any], given: Given) -> str:
    """Where the base model of the adapter is that ``config``, its ``adapter_config.json``, describes.

    A name of the Hugging Face hub is its snapshot in the local cache; nothing is downloaded.

    Raises:
        CheckpointError: neither the user nor the adapter says so, or there is no such folder or snapshot.
    """
    base = given.base or config.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise CheckpointError(peft.CONFIG, "names no base_model_name_or_path; name the base model's folder (--base)")
    try:
        folder_here = Path(base).expanduser()
        if folder_here.is_dir():
            return str(folder_here)
    except (OSError, RuntimeError, ValueError) as error:  # a name that is too long, or of a user there is none of
        raise CheckpointError(peft.CONFIG, f"names the base model {shown(base)}, which is no path: {error}") from error
    where, why = "--base" if given.base else peft.CONFIG, "which is no folder here"
    if base.startswith(HUB) or (could_be_on_hub(base) and not given.base):
        try:
            return str(find_on_hub(base, fetch=False))
        except CheckpointError as error:
            why = f"which is no folder here, and as a model of the hub: {error.rule}"
    raise CheckpointError(where, f"names the base model {base!r}, {why}; name its folder (--base)")


def pinned(path: str | Path, given: Given) -> Given:
    """``given`` with the very folder of an adapter's base model, or of the adapter that is added: later saves change neither.

    Raises:
        CheckpointError: there is no such folder, or it is no checkpoint of a known layout.
    """
    folder, layout = recognise(path)
    _refuse_two(layout is peft, given)
    if layout is peft:
        base, _ = recognise(adapted_base(peft.read_config(folder), given))
        return dataclasses.replace(given, base=str(base.path))
    if given.adapter is not None:
        adapter, _ = recognise(given.adapter)
        return dataclasses.replace(given, adapter=str(adapter.path))
    return dataclasses.replace(given, base=base_beside(folder, given))


def _refuse_two(is_adapter: bool, given: Given) -> None:
    """Refuse an adapter that is to be added to another."""
    if is_adapter and given.adapter is not None:
        raise CheckpointError(given.adapter, "would be a second adapter beside the one that is opened; there is one at a time")


def base_beside(folder: Folder, given: Given) -> str | None:
    """The very folder of the base of a save that may hold an adapter alone: ``None`` where nothing names one that is here."""
    config = adapter_config(folder, given)
    try:
        return None if config is None else str(recognise(adapted_base(config, given))[0].path)
    except CheckpointError:
        return given.base


def open_adapted(folder: Folder, base: str, given: Given, verify: Verification) -> Structure:
    """The model at ``base`` with the adapter in ``folder`` added, whose folder and tokenizer, if it has one, count.

    Raises:
        CheckpointError: one of the two is not sound, they do not fit, or the adapter remembers another base model.
    """
    config = peft.read_config(folder)
    manifest = load_manifest(folder)
    if manifest is not None:
        check_sizes(folder, manifest)
        if verify == "sha256":
            check_hashes(folder, manifest)
    adapter = peft.open_weights(folder)
    try:
        if manifest is not None:
            _check_table(manifest, adapter.places)
        step = step_in_name(folder.path) if manifest is None else manifest.step
        adapter = dataclasses.replace(adapter, step=step, adapter=config)
        return _on_base(folder, adapter, base, given, verify, peft.NAME, manifest)
    except BaseException:
        adapter.close()
        raise


def _on_base(
    folder: Folder,
    adapter: Weights,
    base: str,
    given: Given,
    verify: Verification,
    layout: str,
    manifest: Manifest | None = None,
    trained: Mapping[str, Any] = NOTHING_KNOWN,
) -> Structure:
    """The model at ``base`` with ``adapter``, which is ``folder``'s, added; owns the files of both.

    Args:
        trained: the configuration of the model that the adapter was saved in, as far as it is known.

    Raises:
        CheckpointError: the base is not sound or an adapter itself, the two do not fit, or ``manifest``, the adapter's,
            remembers another base model. The adapter's files stay the caller's.
    """
    assert adapter.adapter is not None
    below = _opened(base, verify, dataclasses.replace(given, base=None, adapter=None), is_base=True)
    try:
        if manifest is not None:
            _check_base(manifest, below)
        weights = peft.merged(below.weights, adapter, adapter.adapter, below.config)
        _check_rows(weights, below.config, trained)
    except BaseException:
        below.close()
        raise
    own = find_tokenizer(folder, given, above=layout != peft.NAME)
    tokenizer = own if any(own.has(name) for name in TOKENIZER_FILES) else below.tokenizer
    model = {**below.config, **weights.changes}
    return Structure(folder, model, below.generation_config, None, weights, f"{layout}{ADAPTED}{below.layout}", tokenizer)


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
        rule = f"remembers another base model than {base.folder.path}; it was trained beside {remembered.get('folder')}"
        raise CheckpointError(MANIFEST, f"{rule}: name that one (--base), or join them with `tessera-finetune merge`")


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
