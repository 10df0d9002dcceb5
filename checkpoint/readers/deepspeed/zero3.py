"""Reads the saves of DeepSpeed's ZeRO-3, in which each data-parallel rank has its part of every tensor.

Of a tensor with n elements, W ranks each hold ceil(n / W) in a row, the last of them with padding. On a rank these parts follow
one another in one flat vector, in the order of ``param_shapes``: the fp32 master weights, in its optimizer file or, where the
optimizer was on NVMe, in swap files that were copied beside. What was not trained lies in pieces of the same size in the model
files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from checkpoint.disk.folder import Folder
from checkpoint.errors import CheckpointError
from checkpoint.given import NOTHING_GIVEN, Given
from checkpoint.layout import Stored
from checkpoint.readers.deepspeed import one_save, saves
from checkpoint.readers.deepspeed.adapted import of_model
from checkpoint.readers.deepspeed.client_state import SOUGHT, client_config, client_tokenizer
from checkpoint.readers.deepspeed.saves import OPTIMIZER, PARTITIONED_MODEL, UNIVERSAL, Flat, Saved, Stretch, open_saved
from checkpoint.readers.deepspeed.swap import Swapped
from checkpoint.readers.weights import OpenFiles, Weights

NAME = "DeepSpeed ZeRO-3"
LOOKS_LIKE = "zero_pp_rank_0_mp_rank_00_model_states.pt and optimizer files of every rank, or above them `latest`"
newest_below = saves.newest_below


def recognises(folder: Folder) -> bool:
    """Whether the folder has the parts of a model under ZeRO-3."""
    return saves.has_any(folder, PARTITIONED_MODEL) and not folder.has(UNIVERSAL)


def open_weights(folder: Folder, given: Given = NOTHING_GIVEN) -> Weights:
    """Open the files of every rank and prove that they are of one save and hold every tensor once.

    Raises:
        CheckpointError: a rank's file is missing, of another world size or cut short; a tensor is left out, lies in quantised
            pieces, or belongs to a mixture of experts or to an adapter that cannot be joined.
    """
    names = folder.names()
    saves.refuse_experts(names)
    _refuse_model_parallel(names)
    model_files = saves.data_parallel_files(names, PARTITIONED_MODEL, "a part of the model")
    optimizer_files = saves.data_parallel_files(names, OPTIMIZER, "the optimizer's state")
    if len(model_files) != len(optimizer_files):
        rule = f"is of {len(model_files)} ranks' model files; {len(optimizer_files)} ranks have an optimizer file"
        raise CheckpointError(model_files[-1], rule)
    with OpenFiles(folder) as files:
        models = [open_saved(files, name) for name in model_files]
        one_save.check_model_files(models)
        first = models[0]
        shapes = _groups(first)
        flats = _flats(files, folder, optimizer_files, first, shapes)
        places = _trained(shapes, flats) | frozen_places(models)
        places |= whole_places(first, places)
        saves.check_cover(first.file, places)
        facts = _facts(first, shapes, flats)
        config = client_config(folder, given, first)
        tokenizer = client_tokenizer(folder, given, first)
        weights = Weights(
            files.descriptors, places, first.file, config, SOUGHT, step=saves.step_of(first), facts=facts, tokenizer=tokenizer
        )
        return of_model(weights, folder, given)


def _refuse_model_parallel(names: Sequence[str]) -> None:
    """ZeRO-3 over ranks that already share the model's layers is told by the number of the model-parallel rank."""
    for rank, name in saves.by_rank(names, PARTITIONED_MODEL).items():
        if rank[1]:
            raise CheckpointError(
                name, f"is of model-parallel rank {rank[1]}; ZeRO-3 together with model parallelism is not read"
            )


@dataclass(frozen=True, slots=True)
class _Parameter:
    name: str
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    def part(self, world: int) -> int:
        """Elements that each of ``world`` ranks has of it, padding included."""
        return -(-self.count // world)


_Groups = list[list[_Parameter]]


def _groups(first: Saved) -> _Groups:
    """The trained parameters of each sub-group, in the order of the flat vectors."""
    groups = first.get("param_shapes")
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        rule = "has no param_shapes, by which the elements of the ranks are found; it was saved without an optimizer"
        raise CheckpointError(first.file, rule)
    found = [[_Parameter(name, saves.shape_of(first, name, shape)) for name, shape in group.items()] for group in groups]
    seen: set[str] = set()
    for parameter in (parameter for group in found for parameter in group):
        if parameter.name in seen:
            raise CheckpointError(first.file, f"has {parameter.name!r} in two sub-groups")
        seen.add(parameter.name)
    return found


def _flats(files: OpenFiles, folder: Folder, names: Sequence[str], first: Saved, groups: _Groups) -> list[Flat]:
    """The flat vector of every rank; all have the length that the shapes call for."""
    world = len(names)
    sub_groups = [([parameter.name for parameter in group], sum(p.part(world) for p in group)) for group in groups]
    swapped = Swapped(folder, files, first, sub_groups)
    needed = sum(parameter.part(world) for group in groups for parameter in group)
    flats: list[Flat] = []
    optimizers = [open_saved(files, name) for name in names]
    for saved in optimizers:
        saves.check_world(saved, world)
    one_save.check_optimizer_files(optimizers)
    for rank, (name, saved) in enumerate(zip(names, optimizers, strict=True)):
        flat = Flat(_stretches(saved, rank, swapped))
        if flat.count != needed:
            rule = f"holds {flat.count} elements of the weights; {first.file} calls for {needed} on each of {world} ranks"
            raise CheckpointError(name, rule)
        if len(flat.dtypes) > 1:
            raise CheckpointError(name, f"holds the weights in {' and '.join(sorted(flat.dtypes))}; they must be of one type")
        flats.append(flat)
    return flats


def _stretches(saved: Saved, rank: int, swapped: Swapped) -> list[Stretch]:
    """A rank's groups, in order, from its file or, where that holds none of a group's elements, from the swap files."""
    stage = saved.count("optimizer_state_dict", "zero_stage")
    tensors = saved.get("optimizer_state_dict", "fp32_flat_groups")
    if not isinstance(tensors, list) or not tensors:
        beside = "" if stage is None else f" (it says that it is of ZeRO stage {stage})"
        raise CheckpointError(saved.file, f"has no fp32_flat_groups, which hold the weights under ZeRO-3{beside}")
    found: list[Stretch] = []
    for number, tensor in enumerate(tensors):
        if getattr(tensor, "shape", None) == (0,):
            found.append(swapped.stretch(rank, number, len(tensors), tensor.dtype))
        else:
            found.append(saves.stretch_of(saved, f"fp32_flat_groups[{number}]", tensor))
    return found


def _trained(groups: _Groups, flats: Sequence[Flat]) -> dict[str, Stored]:
    """Where the trained parameters lie: each rank's part is a stretch of the tensor's row-major elements."""
    world = len(flats)
    places: dict[str, Stored] = {}
    place = 0
    for parameter in (parameter for group in groups for parameter in group):
        part = parameter.part(world)
        pieces = [
            piece
            for rank, flat in enumerate(flats)
            for piece in flat.boxes(parameter.shape, rank * part, place, max(0, min(part, parameter.count - rank * part)))
        ]
        (dtype,) = flats[0].dtypes
        places[parameter.name] = Stored(dtype, parameter.shape, tuple(pieces))
        place += part
    return places


def frozen_places(models: Sequence[Saved]) -> dict[str, Stored]:
    """Where the parameters lie that are not trained: in pieces in the model file of every rank.

    Raises:
        CheckpointError: a rank has no piece of one, one of another size, or one that is quantised.
    """
    world = len(models)
    places: dict[str, Stored] = {}
    fragments = [model.tensors("frozen_param_fragments") for model in models]
    for name, said in models[0].table("frozen_param_shapes").items():
        parameter = _Parameter(name, saves.shape_of(models[0], name, said))
        part = parameter.part(world)
        pieces = []
        dtype = ""
        for rank, (model, held) in enumerate(zip(models, fragments, strict=True)):
            if name not in held:
                raise CheckpointError(model.file, f"holds no part of {name!r}, which {models[0].file} lists as frozen")
            stretch = saves.stretch_of(model, name, held[name])
            if stretch.dtype not in ("F64", "F32", "F16", "BF16"):
                rule = (
                    f"holds the frozen {name!r} as {stretch.dtype}: quantised (zero_quantized_nontrainable_weights), and the "
                    "scales were not saved, so its values are lost"
                )
                raise CheckpointError(model.file, rule)
            if stretch.count != part:
                rule = (
                    f"holds {stretch.count} elements of the frozen {name!r}; {part} of {list(parameter.shape)} are each rank's"
                )
                raise CheckpointError(model.file, rule)
            dtype = dtype or stretch.dtype
            count = max(0, min(part, parameter.count - rank * part))
            pieces += Flat([stretch]).boxes(parameter.shape, rank * part, 0, count)
        places[name] = Stored(dtype, parameter.shape, tuple(pieces))
    return places


def whole_places(first: Saved, places: Mapping[str, Stored]) -> dict[str, Stored]:
    """What the first rank's file holds whole (buffers), and the names that share a tensor with another; no name is left out.

    Raises:
        CheckpointError: the module has a name of which no file holds any element.
    """
    found: dict[str, Stored] = {}
    shared = first.table("shared_params")
    for name, tensor in first.tensors("module").items():
        if name in places:
            continue
        if name in shared:
            owner = shared[name]
            if owner not in places and ".original_module." in name:
                continue  # peft trained another in its place, and what was frozen was left out
            if owner not in places:
                raise CheckpointError(first.file, f"says that {name!r} is one with {owner!r}, which it does not have")
            found[name] = places[owner]
        elif 0 in tensor.shape:
            raise CheckpointError(first.file, f"holds an empty placeholder for {name!r}, and no file holds its elements")
        else:
            found[name] = first.whole(name, tensor)
    return found


def _facts(first: Saved, groups: _Groups, flats: Sequence[Flat]) -> dict[str, Any]:
    return saves.trained_with(first) | {
        "data-parallel ranks": len(flats),
        "master weights": ", ".join(sorted(flats[0].dtypes)),
        "sub-groups": len(groups),
    }
