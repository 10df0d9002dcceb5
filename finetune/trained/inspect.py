"""``tessera-finetune inspect``: what a checkpoint is, by its headers; and what its tensors hold, read one after the other."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from checkpoint import CheckpointError, Given
from checkpoint.disk.folder import Folder
from checkpoint.disk.manifest import load_manifest
from checkpoint.layout import DTYPE_BYTES, Stored
from checkpoint.opening.prove import open_structure
from checkpoint.opening.recognise import recognise
from checkpoint.opening.structure import Verification
from checkpoint.readers import peft
from checkpoint.readers.surroundings import find_configs
from checkpoint.readers.weights import Format, Weights
from checkpoint.text.tokenizer_files import TOKENIZER_FILES
from finetune.base_model.hub import folder_of
from finetune.errors import ConfigError

_PART_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What one tensor holds. Mean and deviation are of its finite elements; ``None`` where there is none."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    mean: float | None
    deviation: float | None
    """Standard deviation of the population."""
    zeros: float
    """Share of the elements that are 0, from 0 to 1."""
    nan: int
    infinite: int


@dataclass(slots=True, kw_only=True)
class Findings:
    """What is known of a checkpoint."""

    path: str
    """The checkpoint's own folder, which may lie below the one that was named."""
    format: str
    step: int | None = None
    model_type: str | None = None
    """``None`` where no configuration was found."""
    tensors: int = 0
    parameters: int = 0
    """Elements of all tensors; what is stored in several copies, or once under several names, counts once."""
    bytes: int = 0
    """What the tensors take in the files."""
    files: int = 0
    """Files that weights lie in."""
    dtypes: dict[str, int] = field(default_factory=dict)
    """Elements by the type they are stored in."""
    manifest: bool = False
    tokenizer: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    """What the layout's own files say, such as world sizes and what is frozen or shared."""
    problems: list[str] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """What was found, as values that JSON can hold."""
        return asdict(self)


def inspect(path: Path, *, given: Given, tensors: str | None = None, verify: Verification = "structure") -> Findings:
    """Look at a checkpoint of any layout; of an adapter, at its own tensors.

    Args:
        tensors: a pattern of names, with ``*`` and ``?``, of tensors to be read and counted, in parts of bounded size.
        verify: ``sha256`` also compares every byte with the manifest.

    Raises:
        ConfigError: there is no checkpoint of a layout that is known, or no tensor fits the pattern.
    """
    try:
        folder, layout = recognise(folder_of(path, "inspect"))
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    found = Findings(path=str(folder.path), format=layout.NAME)
    _look_around(found, folder, given, above=layout.NAME != "Hugging Face")
    with ExitStack() as stack:
        weights = _opened(found, stack, folder, layout, given, verify)
        if weights is None:
            return found
        found.step = weights.step if found.step is None else found.step
        found.facts = dict(weights.facts)
        found.tensors = len(weights.places)
        found.files = len({piece.file for stored in weights.places.values() for piece in stored.pieces})
        for stored in dict.fromkeys(weights.places.values()):
            elements = math.prod(stored.shape)
            found.parameters += elements
            found.bytes += stored.num_bytes
            found.dtypes[stored.dtype] = found.dtypes.get(stored.dtype, 0) + elements
        for name, stored in weights.places.items():
            if tensors is not None and fnmatch.fnmatchcase(name, tensors):
                found.held.append(_count(name, stored, weights.files))
                _note(found, found.held[-1])
        _note_shared(found, weights)
    if tensors is not None and not found.held:
        raise ConfigError(f"--tensors is {tensors!r}; no tensor of {path} has such a name")
    return found


def _look_around(found: Findings, folder: Folder, given: Given, *, above: bool) -> None:
    """Configuration, manifest and tokenizer."""
    try:
        manifest = load_manifest(folder)
        if manifest is not None:
            found.manifest, found.step = True, manifest.step
        configs = find_configs(folder, given, above=above)
        if configs is not None:
            found.model_type = str(configs[0]["model_type"])
    except CheckpointError as error:
        found.problems.append(str(error))
    if any(folder.has(name) for name in TOKENIZER_FILES):
        found.tokenizer = str(folder.path)


def _opened(
    found: Findings, stack: ExitStack, folder: Folder, layout: Format, given: Given, verify: Verification
) -> Weights | None:
    """The tensors of the checkpoint, whatever is wrong around them; what is wrong is noted."""
    try:
        structure = stack.enter_context(open_structure(folder.path, given=given, verify=verify))
        found.model_type, found.format = str(structure.config["model_type"]), structure.layout
        if any(structure.tokenizer.has(name) for name in TOKENIZER_FILES):
            found.tokenizer = str(structure.tokenizer.path)
        if layout is not peft:
            structure.check_model()
            return structure.weights
    except CheckpointError as error:
        if str(error) not in found.problems:
            found.problems.append(str(error))
    try:
        weights = layout.open_weights(folder, given)
    except CheckpointError as error:
        if str(error) not in found.problems:
            found.problems.append(str(error))
        return None
    stack.callback(weights.close)
    return weights


def _note_shared(found: Findings, weights: Weights) -> None:
    """Names under which one and the same place is stored."""
    names: dict[Stored, list[str]] = {}
    for name, stored in weights.places.items():
        names.setdefault(stored, []).append(name)
    shared = [group for group in names.values() if len(group) > 1]
    if shared:
        found.facts.setdefault("stored once under several names", shared)


def _note(found: Findings, held: Held) -> None:
    if held.nan or held.infinite:
        found.problems.append(f"tensor {held.name!r} holds {held.nan} NaN and {held.infinite} infinite elements")


def _count(name: str, stored: Stored, files: Mapping[str, int]) -> Held:
    """Read a tensor in parts and count what is in it."""
    import torch  # here, for a look at headers needs none of it

    from checkpoint.opening.slices import read_stored

    count = zeros = nan = infinite = 0
    mean = squares = 0.0  # of the elements so far: their mean, and the sum of their squared distances from it
    for part in _parts(stored):
        numbers = read_stored(files, stored, part, dtype=None, device="cpu")[0].double().flatten()
        zeros += int((numbers == 0).sum())
        nan += int(numbers.isnan().sum())
        infinite += int(numbers.isinf().sum())
        finite = numbers[torch.isfinite(numbers)]
        if not len(finite):
            continue
        own = float(finite.mean())
        squares += float((finite - own).square().sum()) + (own - mean) ** 2 * count * len(finite) / (count + len(finite))
        mean += (own - mean) * len(finite) / (count + len(finite))
        count += len(finite)
    return Held(
        name=name,
        dtype=stored.dtype,
        shape=stored.shape,
        mean=mean if count else None,
        deviation=math.sqrt(squares / count) if count else None,
        zeros=zeros / math.prod(stored.shape),
        nan=nan,
        infinite=infinite,
    )


def _parts(stored: Stored) -> Iterator[tuple[slice, ...]]:
    """Rows of bounded size that together are the tensor."""
    if not stored.shape:
        yield ()
        return
    row_bytes = DTYPE_BYTES[stored.dtype] * math.prod(stored.shape[1:])
    rows = max(1, _PART_BYTES // row_bytes)
    for start in range(0, stored.shape[0], rows):
        yield (slice(start, start + rows),)
