"""Reads the saves of DeepSpeed's ZeRO-0, 1 and 2: one file with the whole module, and fp32 master weights cut over the ranks.

The module is in the type that was trained in. The masters of a group of parameters are one flat vector, of which each
data-parallel rank has an equal stretch; the parameters lie in it in the order of ``param_shapes``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from checkpoint.disk.folder import Folder
from checkpoint.errors import CheckpointError
from checkpoint.given import NOTHING_GIVEN, Given
from checkpoint.layout import Stored
from checkpoint.readers.deepspeed import one_save, saves
from checkpoint.readers.deepspeed.adapted import of_model
from checkpoint.readers.deepspeed.client_state import SOUGHT, client_config, client_tokenizer
from checkpoint.readers.deepspeed.saves import ANY_LAYER, MODULE, OPTIMIZER, UNIVERSAL, Flat, Saved, Stretch, open_saved
from checkpoint.readers.weights import OpenFiles, Weights

NAME = "DeepSpeed ZeRO-0, 1 or 2"
LOOKS_LIKE = "mp_rank_00_model_states.pt, or above it `latest`"
newest_below = saves.newest_below


def recognises(folder: Folder) -> bool:
    """Whether the folder has the file of one whole module."""
    modules = [name for name in folder.names() if MODULE.fullmatch(name)]
    return len(modules) == 1 and not saves.has_any(folder, ANY_LAYER) and not folder.has(UNIVERSAL)


def open_weights(folder: Folder, given: Given = NOTHING_GIVEN) -> Weights:
    """Open the module's file and, where the master weights are asked for, those of every rank's optimizer.

    Raises:
        CheckpointError: the module is not there or that of a pipeline, or has an adapter that cannot be joined; the masters are
            asked for and are not there, or do not cover what they are of.
    """
    names = folder.names()
    saves.refuse_experts(names)
    (name,) = (name for name in names if MODULE.fullmatch(name))
    with OpenFiles(folder) as files:
        module = open_saved(files, name)
        shared = module.count("mp_world_size")
        if shared is not None and shared > 1:
            rule = f"says that {shared} ranks share the model; the folder has the file of one: those of others are missing"
            raise CheckpointError(name, rule)
        places = module_places(module)
        facts = saves.trained_with(module)
        for said, key in (("data-parallel ranks", "dp_world_size"), ("model-parallel ranks", "mp_world_size")):
            facts |= {said: module.get(key)} if module.count(key) is not None else {}
        facts["weights"] = "the module, in the type of training"
        if given.master_weights:
            masters = _masters(files, names, module, places)
            places |= masters
            facts["weights"] = f"the optimizer's masters for {len(masters)} tensors, the module for the others"
        saves.check_cover(name, places)
        config = client_config(folder, given, module)
        tokenizer = client_tokenizer(folder, given, module)
        weights = Weights(
            files.descriptors, places, name, config, SOUGHT, step=saves.step_of(module), facts=facts, tokenizer=tokenizer
        )
        return of_model(weights, folder, given)


def module_places(saved: Saved) -> dict[str, Stored]:
    """Where the tensors of a file's ``module`` lie.

    Raises:
        CheckpointError: it has none: a pipeline keeps its layers in files of their own.
    """
    tensors = saved.tensors("module")
    if not tensors:
        raise CheckpointError(saved.file, "holds no module; the weights of a pipeline lie in layer_* files, which are missing")
    return {name: saved.whole(name, tensor) for name, tensor in tensors.items()}


def _masters(files: OpenFiles, names: Sequence[str], module: Saved, places: Mapping[str, Stored]) -> dict[str, Stored]:
    """The fp32 masters of every trained tensor, and of what shares one with it."""
    if not any(OPTIMIZER.fullmatch(name) for name in names):
        if all(stored.dtype in ("F32", "F64") for stored in places.values()):
            return {}  # trained in fp32: the module is its own master
        rule = "keeps its fp32 master weights in no optimizer file of ZeRO; open it without asking for them (--master-weights)"
        raise CheckpointError(module.file, rule)
    ranks = [open_saved(files, name) for name in saves.data_parallel_files(names, OPTIMIZER, "the optimizer's state")]
    for saved in ranks:
        saves.check_world(saved, len(ranks))
    one_save.check_optimizer_files(ranks)
    shapes, paddings = module.get("param_shapes"), ranks[0].get("optimizer_state_dict", "param_alignment_paddings")
    if not isinstance(shapes, list) or not all(isinstance(group, dict) for group in shapes):
        raise CheckpointError(module.file, "has no param_shapes, by which the elements of the master weights are found")
    found: dict[str, Stored] = {}
    for number, (group, flat) in enumerate(zip(shapes, _flats(ranks, len(shapes)), strict=True)):
        gaps = paddings[number] if isinstance(paddings, list) and number < len(paddings) else [0] * len(group)
        if not isinstance(gaps, list) or len(gaps) != len(group) or any(type(gap) is not int or gap < 0 for gap in gaps):
            raise CheckpointError(ranks[0].file, f"has no padding for each parameter of group {number}")
        found |= _laid_out(module, group, gaps, flat, len(ranks), places)
    share(module, places, found)
    return found


def _flats(ranks: Sequence[Saved], groups: int) -> list[Flat]:
    """The vector of each group, joined of the ranks' stretches."""
    stretches: list[list[Stretch]] = [[] for _ in range(groups)]
    for saved in ranks:
        tensors = saved.get("optimizer_state_dict", "single_partition_of_fp32_groups")
        if not isinstance(tensors, list) or len(tensors) != groups:
            raise CheckpointError(saved.file, f"does not hold a part of the fp32 master weights of each of {groups} groups")
        for number, tensor in enumerate(tensors):
            if getattr(tensor, "shape", None) != (0,):  # of the last ranks, all may be padding, which is not saved
                stretches[number].append(saves.stretch_of(saved, f"single_partition_of_fp32_groups[{number}]", tensor))
    return [Flat(part) for part in stretches]


def _laid_out(
    module: Saved, group: Mapping[Any, Any], gaps: Sequence[int], flat: Flat, world: int, places: Mapping[str, Stored]
) -> dict[str, Stored]:
    """Where the parameters of one group lie in its vector: one after another, in the order in which the group lists them.

    ``param_slice_mappings`` is not asked: with ``round_robin_gradients`` it has the places of another order.
    """
    found: dict[str, Stored] = {}
    place = 0
    for (name, said), gap in zip(group.items(), gaps, strict=True):
        shape = saves.shape_of(module, name, said)
        if name not in places or places[name].shape != shape:
            raise CheckpointError(module.file, f"lists {name!r} {list(shape)} as trained, which its module does not have")
        count = math.prod(shape)
        if place + count > flat.count:
            break
        pieces = tuple(flat.boxes(shape, 0, place, count))
        found[name] = Stored(pieces[0].extent.dtype, shape, pieces)
        place += count + gap
    # Vectors are aligned to twice the number of ranks; what is padding at the end may be saved or not.
    if len(found) < len(group) or flat.count - place >= 2 * world:
        rule = f"has groups whose master weights hold {flat.count} elements, not the {place} or more that their parameters take"
        raise CheckpointError(module.file, rule)
    return found


def share(module: Saved, places: Mapping[str, Stored], masters: dict[str, Stored]) -> None:
    """Give the masters to every name of a tensor that has several: the module holds those at one place."""
    owners = {places[name]: name for name in masters}
    for name, stored in places.items():
        owner = owners.get(stored)
        if name not in masters and owner is not None:
            masters[name] = masters[owner]
    for name, owner in module.table("shared_params").items():
        if name in places and owner in masters and name not in masters:
            masters[name] = masters[owner]
