"""Reads the layer files of DeepSpeed's pipelines: one for each layer of the ``PipelineModule``, with the layer's own names."""

from __future__ import annotations

from checkpoint.disk.folder import Folder
from checkpoint.errors import CheckpointError
from checkpoint.given import NOTHING_GIVEN, Given
from checkpoint.layout import Stored
from checkpoint.model.config import layers as num_layers
from checkpoint.readers.deepspeed import one_save, saves
from checkpoint.readers.deepspeed.layer_map import rename
from checkpoint.readers.deepspeed.saves import LAYER, MODULE, UNIVERSAL, open_saved
from checkpoint.readers.surroundings import find_configs
from checkpoint.readers.weights import OpenFiles, Weights

NAME = "DeepSpeed pipeline"
LOOKS_LIKE = "layer_00-model_states.pt and one for each further layer, or above them `latest`"
newest_below = saves.newest_below


def recognises(folder: Folder) -> bool:
    """Whether the folder has layers of a pipeline without a model axis, which have no number of a model-parallel rank."""
    return saves.has_any(folder, LAYER) and not folder.has(UNIVERSAL)


def open_weights(folder: Folder, given: Given = NOTHING_GIVEN) -> Weights:
    """Open every layer's file, and the first stage's, which says what was trained.

    Raises:
        CheckpointError: a layer is missing, or it cannot be told which of the model's it is.
    """
    names = folder.names()
    saves.refuse_experts(names)
    layers = {rank[0]: name for rank, name in sorted(saves.by_rank(names, LAYER).items())}
    stages = [name for name in names if MODULE.fullmatch(name)]
    with OpenFiles(folder) as files:
        places: dict[str, Stored] = {}
        for number, file in layers.items():
            saved = open_saved(files, file)
            tensors = saved.tensors()
            if not tensors:
                raise CheckpointError(file, "holds no tensor")
            saves.refuse_adapter(file, tensors)
            places |= {f"{number}.{name}": saved.whole(name, tensor) for name, tensor in tensors.items()}
        step, facts = None, {}
        opened = [open_saved(files, file) for file in stages]
        one_save.check_model_files(opened)
        for file, stage in zip(stages, opened, strict=True):
            said = stage.count("mp_world_size")
            if said is not None and said != len(stages):
                rule = f"says that there are {said} stages; the folder has the files of {len(stages)}: some are missing"
                raise CheckpointError(file, f"{rule}, and with them what tells whether every layer is there")
            step, facts = saves.step_of(stage), saves.trained_with(stage)
            for group in stage.get("param_shapes") or []:
                for name in group if isinstance(group, dict) else ():
                    if str(name).partition(".")[0].isdecimal() and name not in places:
                        rule = f"is missing, though {file} says that tensor {name!r} was trained"
                        raise CheckpointError(f"layer_{str(name).partition('.')[0]:0>2}-model_states.pt", rule)
        configs = find_configs(folder, given, above=True)
        told = None if configs is None else num_layers(configs[0])
        found = rename(places, given.layer_map, next(iter(layers.values())), told)
        facts |= {"layers": len(layers), "stages": len(stages)}
        return Weights(files.descriptors, found, next(iter(layers.values())), step=step, facts=facts)
