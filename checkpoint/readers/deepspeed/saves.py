"""What the layouts of DeepSpeed have in common: names of files, their pickles, flat vectors, which save is the newest."""

from __future__ import annotations

import itertools
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from checkpoint.disk.folder import Folder
from checkpoint.disk.latest import LATEST, MAX_LATEST_BYTES
from checkpoint.errors import CheckpointError
from checkpoint.layout import DTYPE_BYTES, Extent, Piece, Stored, cover_fault, flat_boxes, whole
from checkpoint.readers.files.pickles import NUMPY_ARRAYS, Allowed, StoredTensor
from checkpoint.readers.files.stand_ins import Table
from checkpoint.readers.files.torch_zip import Archive
from checkpoint.readers.weights import OpenFiles

PARTITIONED_MODEL = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
"""One data-parallel rank's part of a model under ZeRO-3."""
OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
MODULE = re.compile(r"mp_rank_(\d+)_model_states\.pt")
"""One model-parallel rank's whole module."""
LAYER = re.compile(r"layer_(\d+)(?:-model_00)?-model_states\.pt")
"""A layer of a pipeline, whole: of one without a model axis, or with the only rank on it."""
LAYER_PART = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
"""A model-parallel rank's part of a layer, which is all of it where there is one rank."""
ANY_LAYER = re.compile(r"layer_\d+-.*model_states\.pt")
_EXPERT = re.compile(r"(layer_\d+_expert_\d+_mp_rank_\d+_model_states|expp_rank_\d+_mp_rank_\d+_optim_states)\.pt")
UNIVERSAL = "zero"
"""The folder of a universal checkpoint that has a folder for each tensor."""
LATEST_UNIVERSAL = "latest_universal"
_SAVE = re.compile(r"global_step(\d+)")
_TRAINER_SAVE = re.compile(r"checkpoint-(\d+)")
_NAMED_AT_MOST = 6

_ADAPTER = re.compile(r"(^|\.)(lora_\w+|modules_to_save)\.")
"""Parts of the names that peft gives the tensors of an adapter and what it trains beside one."""


def _rebuild_from_type(make: Any, _: Any, args: Any, *__: Any) -> StoredTensor:
    """Stand-in of ``torch._tensor._rebuild_from_type_v2``, by which parameters of a class of their own are pickled."""
    made = make(*args)
    if not isinstance(made, StoredTensor):
        raise ValueError("what is rebuilt with a type is no tensor")
    return made


ALLOWED = Allowed(
    classes=frozenset(
        {
            "deepspeed.runtime.fp16.loss_scaler.LossScaler",
            "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
            "deepspeed.runtime.zero.config.ZeroStageEnum",
            "deepspeed.utils.tensor_fragment.fragment_address",
            "torch.Tensor",
            "torch.nn.parameter.Parameter",
            "torch.device",
            # What users keep in client_state: settings, and states of random numbers.
            "argparse.Namespace",
            "__builtin__.set",
            "builtins.set",
        }
    )
    | NUMPY_ARRAYS,
    calls={"torch._tensor._rebuild_from_type_v2": _rebuild_from_type, "collections.defaultdict": lambda *_: Table()},
)
"""What the files of DeepSpeed's engines hold beside tensors (0.9 to 0.19) and what is commonly saved with them."""


@dataclass(frozen=True, slots=True)
class Saved:
    """One file that an engine saved, its table read."""

    file: str
    archive: Archive
    tree: Mapping[str, Any]

    def get(self, *path: str) -> Any:
        """The value at ``path``, key below key; ``None`` where there is none."""
        value: Any = self.tree
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    def table(self, *path: str) -> Mapping[Any, Any]:
        """The dictionary at ``path``; empty where there is none.

        Raises:
            CheckpointError: something else stands there.
        """
        value = self.get(*path)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise CheckpointError(self.file, f"has {type(value).__name__} at {'.'.join(path)}, where a table must stand")
        return value

    def tensors(self, *path: str) -> dict[str, StoredTensor]:
        """The dictionary from names to tensors at ``path``; empty where there is none.

        Raises:
            CheckpointError: something else stands there.
        """
        found: dict[str, StoredTensor] = {}
        for name, tensor in self.table(*path).items():
            if not isinstance(name, str) or not isinstance(tensor, StoredTensor):
                raise CheckpointError(self.file, f"has {name!r} in {'.'.join(path)}, which is no tensor with a name")
            found[name] = tensor
        return found

    def whole(self, name: str, tensor: StoredTensor) -> Stored:
        """A tensor that this file holds whole."""
        return whole(self.file, self.archive.extent(name, tensor))

    def count(self, *path: str) -> int | None:
        """The number from 0 up at ``path``, the largest of a list of such; ``None`` where there is none."""
        value = self.get(*path)
        values = value if isinstance(value, list) else [value]
        counts = [item for item in values if type(item) is int and item >= 0]
        return max(counts) if counts and len(counts) == len(values) else None


def open_saved(files: OpenFiles, name: str, *, bare: bool = False) -> Saved:
    """Open a file and read its table.

    Args:
        bare: a tensor in place of a table is one, too, at ``param``.

    Raises:
        CheckpointError: it is no archive of torch, names what such a file does not need, or holds no table.
    """
    archive = Archive(files[name], name)
    tree = archive.tree(ALLOWED)
    if bare and isinstance(tree, StoredTensor):
        tree = {"param": tree}
    if not isinstance(tree, dict):
        raise CheckpointError(name, f"holds {type(tree).__name__}, not the table that an engine saves")
    return Saved(name, archive, tree)


def by_rank(names: Iterable[str], pattern: re.Pattern[str]) -> dict[tuple[int, ...], str]:
    """Files that ``pattern`` matches, by the numbers in their names.

    Raises:
        CheckpointError: two are of the same rank.
    """
    found: dict[tuple[int, ...], str] = {}
    for name in names:
        match = pattern.fullmatch(name)
        if match is None:
            continue
        rank = tuple(int(number) for number in match.groups())
        if rank in found:
            raise CheckpointError(
                name, f"stands beside {found[rank]}: two saves lie in one folder; which counts cannot be told"
            )
        found[rank] = name
    return found


def data_parallel_files(names: Sequence[str], pattern: re.Pattern[str], what: str, mp: int = 0) -> list[str]:
    """The files of model-parallel rank ``mp`` in the order of their data-parallel ranks.

    Raises:
        CheckpointError: there are none, or one is missing between them.
    """
    found = {rank[0]: name for rank, name in by_rank(names, pattern).items() if rank[1] == mp}
    for rank in range(len(found)):
        if rank not in found:
            rule = f"is missing: {what} of rank {rank} of {max(found) + 1}; was the save interrupted, or not all of it copied?"
            raise CheckpointError(pattern_name(pattern, rank, mp), rule)
    if not found:
        rule = f"and the others with {what} are missing; was the save interrupted, or not all of it copied?"
        raise CheckpointError(pattern_name(pattern, 0, mp), rule)
    return [found[rank] for rank in range(len(found))]


def pattern_name(pattern: re.Pattern[str], rank: int, mp: int) -> str:
    """What a file of ``pattern`` is called, for messages."""
    kind = "model" if pattern is PARTITIONED_MODEL else "optim"
    return f"zero_pp_rank_{rank}_mp_rank_{mp:02d}_{kind}_states.pt"


def check_world(saved: Saved, count: int) -> None:
    """The file agrees that ``count`` ranks wrote the checkpoint.

    Raises:
        CheckpointError: it says another number, or none.
    """
    said = saved.count("optimizer_state_dict", "partition_count")
    if said != count:
        rule = (
            f"says that {said} ranks hold parts of it; the folder has the files of {count}: some are missing or of another save"
        )
        raise CheckpointError(saved.file, rule)


def refuse_experts(names: Iterable[str]) -> None:
    """Refuse mixtures of experts, whose experts lie in files of their own."""
    expert = next((name for name in names if _EXPERT.fullmatch(name)), None)
    if expert is not None:
        raise CheckpointError(expert, "holds the experts of a mixture (DeepSpeed MoE or AutoEP); such checkpoints are not read")


def refuse_adapter(file: str, names: Iterable[str]) -> None:
    """Refuse the tensors of an adapter, in layouts in which it is not joined with its base model."""
    adapter = next((name for name in names if _ADAPTER.search(name)), None)
    if adapter is not None:
        rule = (
            f"holds {adapter!r}, of a model under training with an adapter; in this layout it is not read: "
            "save the adapter by peft's save_pretrained and join it with its base model (`tessera-finetune merge`)"
        )
        raise CheckpointError(file, rule)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Elements in a row in one file."""

    file: str
    dtype: str
    offset_bytes: int
    count: int


class Flat:
    """One rank's flat vector, which may lie in several stretches, one after another."""

    def __init__(self, stretches: Iterable[Stretch]) -> None:
        self._stretches = [stretch for stretch in stretches if stretch.count]
        self._ends = list(itertools.accumulate(stretch.count for stretch in self._stretches))

    @property
    def count(self) -> int:
        """Elements of all stretches."""
        return self._ends[-1] if self._ends else 0

    @property
    def dtypes(self) -> set[str]:
        """Names of the data types of all stretches."""
        return {stretch.dtype for stretch in self._stretches}

    def boxes(self, shape: tuple[int, ...], first: int, place: int, count: int) -> list[Piece]:
        """The elements ``[first, first + count)`` of a tensor of ``shape``, which lie at ``place`` of the vector."""
        found: list[Piece] = []
        while count:
            number = bisect_right(self._ends, place)
            stretch = self._stretches[number]
            inside = place - (self._ends[number] - stretch.count)
            taken = min(count, stretch.count - inside)
            offset = stretch.offset_bytes + inside * DTYPE_BYTES[stretch.dtype]
            found += flat_boxes(shape, first, stretch.file, stretch.dtype, offset, taken)
            first, place, count = first + taken, place + taken, count - taken
        return found


def stretch_of(saved: Saved, name: str, tensor: object) -> Stretch:
    """A tensor of one dimension in ``saved`` as a stretch.

    Raises:
        CheckpointError: it is no such tensor, or its elements do not lie in a row inside the file.
    """
    if not isinstance(tensor, StoredTensor) or len(tensor.shape) != 1:
        raise CheckpointError(saved.file, f"has something other than a flat tensor at {name}")
    extent: Extent = saved.archive.extent(name, tensor)
    if extent.strides[0] != 1 and extent.shape[0] > 1:
        raise CheckpointError(saved.file, f"has {name} with stride {extent.strides[0]}; its elements must lie in a row")
    return Stretch(saved.file, extent.dtype, extent.offset_bytes, extent.shape[0])


def shape_of(saved: Saved, name: object, shape: object) -> tuple[int, ...]:
    """A shape that a table gives for a tensor.

    Raises:
        CheckpointError: it is none, or the tensor has no element.
    """
    if not isinstance(name, str) or not isinstance(shape, tuple) or any(type(size) is not int or size < 1 for size in shape):
        raise CheckpointError(saved.file, f"gives the tensor {name!r} the shape {shape!r}")
    return shape


def check_cover(table: str, places: Mapping[str, Stored]) -> None:
    """Every tensor's pieces cover it once.

    Raises:
        CheckpointError: those of one do not.
    """
    for name, stored in places.items():
        fault = cover_fault(stored)
        if fault is not None:
            raise CheckpointError(stored.file if stored.pieces else table, f"tensor {name!r}: {fault}")


def newest_below(folder: Folder) -> str | None:
    """The name of the folder in ``folder`` that holds the newest save of DeepSpeed; ``None`` where this is no root of saves.

    ``latest`` says which; without it, the highest step of those that engines and Hugging Face's Trainer name themselves.

    Raises:
        CheckpointError: ``latest`` names what is not there, or not a save.
    """
    names = folder.names()
    saves = [name for name in names if is_save(folder, name)]
    for table in (LATEST, LATEST_UNIVERSAL):
        if table in names:
            return _named(folder, table, saves)
    numbered = [(int(match[1]), name) for name in saves if (match := _SAVE.fullmatch(name))]
    if numbered:
        return max(numbered)[1]
    trainer = [(int(match[1]), name) for name in names if (match := _TRAINER_SAVE.fullmatch(name))]
    return next((name for _, name in sorted(trainer, reverse=True) if _is_trainers(folder, name)), None)


def is_save(folder: Folder, name: str) -> bool:
    """Whether ``name`` is a folder in ``folder`` with files that engines write."""
    if not (folder.path / name).is_dir():
        return False
    inner = folder.below(name)
    return _any_match(inner.names(), (PARTITIONED_MODEL, OPTIMIZER, MODULE, ANY_LAYER)) or inner.has(UNIVERSAL)


def _named(folder: Folder, table: str, saves: Sequence[str]) -> str:
    name = folder.read_text(table, limit=MAX_LATEST_BYTES).strip()
    if name in saves:
        return name
    others = [save for save in saves if save != name]
    listed = ", ".join(others[-_NAMED_AT_MOST:])
    beside = f"; there are {listed}: name one of them to open that" if others else ""
    there = name in folder.names()
    state = "in which there is no file of a save: it was interrupted, or not all of it copied" if there else "which is not here"
    raise CheckpointError(table, f"names {name!r}, {state}{beside}")


def has_saves(folder: Folder) -> bool:
    """Whether the folder is an engine's save, or has one in it."""
    names = folder.names()
    return _any_match(names, (PARTITIONED_MODEL, OPTIMIZER, MODULE)) or any(is_save(folder, name) for name in names)


def _is_trainers(folder: Folder, name: str) -> bool:
    """Whether ``name`` is a folder of Hugging Face's Trainer with an engine's save in it."""
    if not (folder.path / name).is_dir():
        return False
    inner = folder.below(name)
    return inner.has(LATEST) or any(is_save(inner, save) for save in inner.names() if _SAVE.fullmatch(save))


def _any_match(names: Iterable[str], patterns: Sequence[re.Pattern[str]]) -> bool:
    return any(pattern.fullmatch(name) for name in names for pattern in patterns)


def has_any(folder: Folder, pattern: re.Pattern[str]) -> bool:
    """Whether a file of the folder has a name of ``pattern``."""
    return _any_match(folder.names(), (pattern,))


def trained_with(saved: Saved) -> dict[str, Any]:
    """What an engine's file tells of the training, by words a user reads: with what, what was frozen and what is shared."""
    facts: dict[str, Any] = {}
    version = saved.get("ds_version")
    if isinstance(version, str):
        facts["DeepSpeed"] = version
    frozen, shared = saved.get("frozen_param_shapes"), saved.get("shared_params")
    if isinstance(frozen, dict) and frozen:
        facts["frozen tensors"] = len(frozen)
    if isinstance(shared, dict) and shared:
        facts["shared tensors"] = {str(name): str(owner) for name, owner in shared.items()}
    return facts


def step_of(saved: Saved) -> int | None:
    """Optimizer steps taken."""
    return saved.count("global_steps")
