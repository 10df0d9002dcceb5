"""Reads torch.distributed.checkpoint: ``.metadata`` and ``*.distcp``, as FSDP2 scripts, torchtitan and Accelerate save.

``.metadata`` is a pickle that gives each tensor's boxes and, for each box, the stretch of a file that is one archive of
``torch.save``. A save without collectives leaves a ``__RANK.metadata`` for each rank, with that rank's boxes alone.
Source of the format: torch/distributed/checkpoint/metadata.py and filesystem.py, 2.2 to 2.13.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from checkpoint.disk.folder import Folder
from checkpoint.disk.step_names import step_in_names
from checkpoint.errors import CheckpointError, shown
from checkpoint.given import NOTHING_GIVEN, Given
from checkpoint.layout import DTYPE_BYTES, MAX_DIMENSIONS, Piece, Stored, cover_fault
from checkpoint.readers.dcp.trainer_names import from_torchtitan, is_torchtitan, without_buffers
from checkpoint.readers.files.pickles import Allowed, StoredTensor, read_tree
from checkpoint.readers.files.stand_ins import Bag
from checkpoint.readers.files.torch_zip import Archive
from checkpoint.readers.prefixes import chosen
from checkpoint.readers.surroundings import find_configs
from checkpoint.readers.weights import OpenFiles, Weights

NAME = "torch.distributed.checkpoint"
LOOKS_LIKE = ".metadata, a hidden file, and __0_0.distcp"

_TABLE = ".metadata"
_MAX_TABLE_BYTES = 512 << 20
"""A box takes about 240 bytes of ``.metadata``; that of a model of 70 billion parameters on 64 ranks is 11 MB."""

_MAX_OPERATIONS = 1 << 24
"""Operations of the pickle machine at most; a box takes about 45, or 150 with what each rank meant to write."""
_MOST_BOXES = 1 << 16
"""Boxes of one tensor at most; ranks have a box each."""

_RANK_TABLE = re.compile(r"__(\d+)\.metadata")
_DATA = re.compile(r"__(\d+)_\d+\.distcp")
_ACCELERATE, _TITANS = "pytorch_model_fsdp_0", "checkpoint"
_STEP = re.compile(r"(?:step|checkpoint|epoch)[-_](\d+)")

_PACKAGE = "torch.distributed.checkpoint"
_CLASSES = frozenset(
    [
        *(
            f"{_PACKAGE}.metadata.{name}"
            for name in (
                "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
                "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
            )
        ),
        f"{_PACKAGE}.filesystem._StorageInfo",
        # Megatron keeps beside the table what each rank meant to write, which says nothing more.
        *(
            f"{_PACKAGE}.planner.{name}"
            for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")
        ),
        "megatron.core.dist_checkpointing.strategies.torch.MCoreSavePlan",
        "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",
        "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
        "torch.serialization._get_layout",
        *(f"pathlib.{name}" for name in ("PosixPath", "WindowsPath", "PurePosixPath")),
        *(f"pathlib._local.{name}" for name in ("PosixPath", "WindowsPath", "PurePosixPath")),
        *(
            f"torch.{name}"
            for name in (
                "uint16", "uint32", "uint64", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e4m3fnuz",
                "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2",
            )
        ),
    ]
)  # fmt: skip
"""What ``.metadata`` may name; of types of elements those that no tensor is read in, so that a message can name the tensor."""

_OF_TABLE = Allowed(classes=_CLASSES)
_OF_BOX = Allowed()

Place = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Box:
    start: Place
    shape: Place
    file: str
    offset: int
    length: int


@dataclass(slots=True)
class _Tensor:
    dtype: Any
    shape: Place
    boxes: dict[Place, _Box]


def recognises(folder: Folder) -> bool:
    """Whether the folder has the table of such a save, or data without it. Megatron's use of the format is another layout."""
    if folder.has("metadata.json"):
        return False
    return any(name == _TABLE or _RANK_TABLE.fullmatch(name) or _DATA.fullmatch(name) for name in folder.names())


def newest_below(folder: Folder) -> str | None:
    """Accelerate's folder of the model, the folder of the highest step that is whole, or torchtitan's folder of steps."""
    newest = _newest(folder)
    if newest is not None or not (folder.path / _TITANS).is_dir():
        return newest
    return _TITANS if _newest(folder.below(_TITANS)) is not None else None


def _newest(folder: Folder) -> str | None:
    if _is_finished(folder, _ACCELERATE):
        return _ACCELERATE
    found: list[tuple[int, str]] = []
    for name in folder.names():
        match = _STEP.fullmatch(name)
        if match and (folder.path / name).is_dir():
            inner = folder.below(name)
            if _is_finished(folder, name) or _is_finished(inner, _ACCELERATE):
                found.append((int(match[1]), name))
    return max(found)[1] if found else None


def _is_finished(folder: Folder, name: str) -> bool:
    if not (folder.path / name).is_dir():
        return False
    inner = folder.below(name)
    return not inner.has("metadata.json") and any(n == _TABLE or _RANK_TABLE.fullmatch(n) for n in inner.names())


def open_weights(folder: Folder, given: Given = NOTHING_GIVEN) -> Weights:
    """Open every file that a weight lies in, and prove that boxes, archives and files agree, reading headers only.

    Raises:
        CheckpointError: a table is missing, or names what it may not; a box is missing, overlaps another, is compressed, or is
            another tensor than the table says; the weights' names cannot be told.
    """
    tables = _tables(folder)
    tensors, bytes_items = _read_tables(folder, tables)
    names = chosen(list(tensors), given.prefix, tables[0])
    with OpenFiles(folder) as files:
        known: dict[bytes, Any] = {}
        titan = is_torchtitan(names)
        names = without_buffers(names) if titan else names
        _check_apart([box for key in names.values() for box in tensors[key].boxes.values()])
        places = {name: _stored(files, key, tensors[key], known) for name, key in names.items()}
        if titan:
            configs = find_configs(folder, given, above=True)
            places = from_torchtitan(places, None if configs is None else configs[0], tables[0])
    writers = {int(match[1]) for file in files.descriptors if (match := _DATA.fullmatch(file))}
    facts = {
        "writer": "torchtitan" if titan else "torch.distributed.checkpoint",
        "ranks that wrote weights": len(writers),
        "tensors that are no weights": len(tensors) - len(names),
        "other items": bytes_items,
    }
    return Weights(files.descriptors, places, tables[0], step=step_in_names(folder.path), facts=facts)


def read_wanted(folder: Folder, files: OpenFiles, wanted: Callable[[str], bool]) -> tuple[dict[str, Stored], str]:
    """The tensors whose names are wanted, by their names in the files, and the file that lists them.

    Raises:
        CheckpointError: as ``open_weights``.
    """
    tables = _tables(folder)
    tensors = {name: tensor for name, tensor in _read_tables(folder, tables)[0].items() if wanted(name)}
    _check_apart([box for tensor in tensors.values() for box in tensor.boxes.values()])
    known: dict[bytes, Any] = {}
    return {name: _stored(files, name, tensor, known) for name, tensor in tensors.items()}, tables[0]


def read_item(folder: Folder, files: OpenFiles, name: str, allowed: Allowed) -> tuple[Any, str] | None:
    """What is no tensor and was saved under ``name``, and the file it is in; ``None`` where there is nothing of that name.

    Raises:
        CheckpointError: the table or the item is broken, or names what is not allowed.
    """
    table = _tables(folder)[0]
    root = _state(
        read_tree(folder.read_bytes(table, limit=_MAX_TABLE_BYTES), table, _OF_TABLE, _MAX_OPERATIONS), "Metadata", table
    )
    lies = root.get("storage_data")
    for key, info in lies.items() if isinstance(lies, dict) else ():
        if _state(key, "MetadataIndex", table).get("fqn") == name:
            box = _box(name, (), (), _state(info, "_StorageInfo", table), table)
            return Archive(files[box.file], box.file, box.offset, box.length).tree(allowed), box.file
    return None


def _tables(folder: Folder) -> list[str]:
    names = folder.names()
    if _TABLE in names:
        return [_TABLE]
    found = sorted((int(match[1]), name) for name in names if (match := _RANK_TABLE.fullmatch(name)))
    if found:
        ranks = [rank for rank, _ in found]
        if ranks != list(range(len(ranks))):
            missing = next(number for number, rank in enumerate(ranks) if number != rank)
            raise CheckpointError(
                f"__{missing}.metadata", f"is missing, though there is {found[-1][1]}: each lists its rank's boxes"
            )
        return [name for _, name in found]
    unfinished = ".metadata.tmp" in names
    rule = (
        "is missing: the save did not end" if unfinished else "is missing; it is a hidden file, which `cp DIR/*` leaves behind"
    )
    raise CheckpointError(_TABLE, rule)


def _read_tables(folder: Folder, tables: list[str]) -> tuple[dict[str, _Tensor], int]:
    """Every tensor by the name in the files, and how many items are no tensors."""
    tensors: dict[str, _Tensor] = {}
    others: set[str] = set()
    for table in tables:
        root = _state(
            read_tree(folder.read_bytes(table, limit=_MAX_TABLE_BYTES), table, _OF_TABLE, _MAX_OPERATIONS), "Metadata", table
        )
        lies = _storage(root.get("storage_data"), table)
        described = root.get("state_dict_metadata")
        if not isinstance(described, dict) or not all(isinstance(name, str) for name in described):
            raise CheckpointError(table, "has no state_dict_metadata by name")
        for name, item in described.items():
            if isinstance(item, Bag) and item.CLASS.endswith(".BytesStorageMetadata"):
                others.add(name)
                continue
            made = _tensor(name, item, lies, table)
            known = tensors.setdefault(name, made)
            if (known.dtype, known.shape) != (made.dtype, made.shape):
                raise CheckpointError(table, f"gives tensor {name!r} another shape or type than {tables[0]}")
            # Ranks that do not confer each save what all of them hold: one of the equal copies is read.
            for start, box in made.boxes.items():
                if known.boxes.setdefault(start, box).shape != box.shape:
                    raise CheckpointError(table, f"gives the box of {name!r} at {list(start)} another shape than {tables[0]}")
    return tensors, len(others)


def _state(value: object, ends: str, table: str) -> Mapping[str, Any]:
    """The attributes of an object whose class is called ``ends``."""
    if not isinstance(value, Bag) or value.CLASS.rpartition(".")[2] != ends or not isinstance(value.state, dict):
        raise CheckpointError(table, f"has {shown(value)} where {ends} must stand")
    return value.state


def _place(value: object, table: str) -> Place:
    if (
        not isinstance(value, tuple)
        or len(value) > MAX_DIMENSIONS
        or not all(type(item) is int and 0 <= item < 1 << 62 for item in value)
    ):
        raise CheckpointError(table, f"has {shown(value)} where counts must stand")
    return value


def _storage(value: object, table: str) -> dict[tuple[str, Place], Mapping[str, Any]]:
    """Where each box lies, by the tensor's name and the box's first element."""
    if not isinstance(value, dict):
        raise CheckpointError(table, "has no storage_data")
    found: dict[tuple[str, Place], Mapping[str, Any]] = {}
    for key, info in value.items():
        index = _state(key, "MetadataIndex", table)
        if index.get("offset") is None:
            continue
        name, start = index.get("fqn"), _place(index["offset"], table)
        if not isinstance(name, str) or (name, start) in found:
            raise CheckpointError(table, f"gives the box of {name!r} at {list(start)} two places")
        found[name, start] = _state(info, "_StorageInfo", table)
    return found


def _tensor(name: str, item: object, lies: Mapping[tuple[str, Place], Mapping[str, Any]], table: str) -> _Tensor:
    state = _state(item, "TensorStorageMetadata", table)
    shape, chunks = _place(state.get("size"), table), state.get("chunks")
    properties = state.get("properties")
    fields = properties.state if isinstance(properties, Bag) else None
    if not isinstance(fields, tuple) or not fields or not isinstance(chunks, list):
        raise CheckpointError(table, f"does not describe tensor {name!r}")
    if len(chunks) > _MOST_BOXES:
        raise CheckpointError(table, f"cuts tensor {name!r} into {len(chunks)} boxes; at most {_MOST_BOXES} are read")
    boxes: dict[Place, _Box] = {}
    for chunk in chunks:
        parts = _state(chunk, "ChunkStorageMetadata", table)
        start, sizes = _place(parts.get("offsets"), table), _place(parts.get("sizes"), table)
        if 0 in sizes:
            continue  # what a rank holds of a tensor with fewer rows than ranks
        if (name, start) not in lies or start in boxes:
            raise CheckpointError(table, f"does not say, once, where the box of {name!r} at {list(start)} lies")
        boxes[start] = _box(name, start, sizes, lies[name, start], table)
    return _Tensor(fields[0], shape, boxes)


def _box(name: str, start: Place, sizes: Place, info: Mapping[str, Any], table: str) -> _Box:
    file, offset, length = info.get("relative_path"), info.get("offset"), info.get("length")
    if not isinstance(file, str) or "/" in file or type(offset) is not int or type(length) is not int:
        raise CheckpointError(
            table, f"puts the box of {name!r} at {list(start)} in {shown(file)}, which is no file of the folder"
        )
    if not 0 <= offset < 1 << 62 or not 0 < length < 1 << 62:
        raise CheckpointError(table, f"puts the box of {name!r} at {list(start)} at bytes {offset} and {length} after")
    transforms = info.get("transform_descriptors")
    if transforms:
        rule = f"stores tensor {name!r} through {shown(transforms)}; compressed boxes cannot be read in part"
        raise CheckpointError(table, f"{rule}: save without extensions")
    return _Box(start, sizes, file, offset, length)


def _check_apart(boxes: Iterable[_Box]) -> None:
    """No two archives share a byte of a file."""
    ends: dict[str, int] = {}
    for box in sorted(boxes, key=lambda box: (box.file, box.offset)):
        if box.offset < ends.get(box.file, 0):
            raise CheckpointError(box.file, f"has two boxes of tensors at byte {box.offset}")
        ends[box.file] = box.offset + box.length


def _refuse_dtype(name: str, dtype: object, file: str) -> NoReturn:
    kind = dtype.CLASS if isinstance(dtype, type) and issubclass(dtype, Bag) else shown(dtype)
    raise CheckpointError(file, f"tensor {name!r} is of {kind}; supported are {', '.join(DTYPE_BYTES)}")


def _stored(files: OpenFiles, name: str, tensor: _Tensor, known: dict[bytes, Any]) -> Stored:
    """Where the boxes of a tensor lie, by the tables of their archives, which know the strides.

    Args:
        known: what tables say that were read before: those of boxes of one shape are the same bytes.
    """
    first = next(iter(tensor.boxes.values()), None)
    if first is None or 0 in tensor.shape:
        raise CheckpointError(_TABLE, f"tensor {name!r} of shape {list(tensor.shape)} has no element")
    if not isinstance(tensor.dtype, str) or tensor.dtype not in DTYPE_BYTES:
        _refuse_dtype(name, tensor.dtype, first.file)
    pieces: list[Piece] = []
    for box in tensor.boxes.values():
        archive = Archive(files[box.file], box.file, box.offset, box.length)
        if archive.table not in known:
            known[archive.table] = archive.tree(_OF_BOX)
        held = known[archive.table]
        if not isinstance(held, StoredTensor) or (held.dtype, held.shape) != (tensor.dtype, box.shape):
            rule = (
                f"does not hold, at byte {box.offset}, the box {list(box.shape)} of tensor {name!r} that the table puts there"
            )
            raise CheckpointError(box.file, rule)
        pieces.append(Piece(box.file, archive.extent(name, held), box.start))
    stored = Stored(tensor.dtype, tensor.shape, tuple(pieces))
    fault = cover_fault(stored)
    if fault is not None:
        raise CheckpointError(first.file, f"tensor {name!r} of {math.prod(tensor.shape)} elements: {fault}")
    return stored
