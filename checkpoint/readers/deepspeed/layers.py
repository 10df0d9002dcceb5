"""Reads the layer files of DeepSpeed's pipelines: one for each layer of the ``PipelineModule``, with the layer's own names."""

from __future__ import annotations

from collections.abc import Sequence

from checkpoint.disk.folder import Folder
from checkpoint.errors import CheckpointError
from checkpoint.given import NOTHING_GIVEN, Given
from checkpoint.layout import Stored
from checkpoint.readers.deepspeed import one_save, saves
from checkpoint.readers.deepspeed.client_state import SOUGHT, client_config, client_tokenizer, known_config
from checkpoint.readers.deepspeed.layer_map import file_of_layer, rename
from checkpoint.readers.deepspeed.saves import LAYER, LAYER_PART, MODULE, UNIVERSAL, open_saved
from checkpoint.readers.weights import OpenFiles, Weights

NAME = "DeepSpeed pipeline"
LOOKS_LIKE = (
    "layer_00-model_states.pt (or layer_00-model_00-model_states.pt) and one for each further layer, or above them `latest`"
)
newest_below = saves.newest_below


def recognises(folder: Folder) -> bool:
    """Whether the folder has files of a pipeline's layers. Other trainers whose files are called so are asked before."""
    return (saves.has_any(folder, LAYER) or saves.has_any(folder, LAYER_PART)) and not folder.has(UNIVERSAL)


def open_weights(folder: Folder, given: Given = NOTHING_GIVEN) -> Weights:
    """Open every layer's file, and the first stage's, which says what was trained.

    Raises:
        CheckpointError: a layer is missing, or shared by model-parallel ranks, or it cannot be told which of the model's it is.
    """
    names = folder.names()
    saves.refuse_experts(names)
    _refuse_parts(names)
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
                        missing = file_of_layer(int(str(name).partition(".")[0]), next(iter(layers.values())))
                        raise CheckpointError(missing, rule)
        config = client_config(folder, given, opened[0]) if opened else None
        table = next(iter(layers.values()))
        found = rename(places, given.layer_map, table, known_config(folder, given, config))
        facts |= {"layers": len(layers), "stages": len(stages)}
        sought = SOUGHT if opened else "there is no mp_rank_00_model_states.pt, whose client_state could"
        tokenizer = client_tokenizer(folder, given, opened[0]) if opened else None
        return Weights(files.descriptors, found, table, config, sought, step=step, facts=facts, tokenizer=tokenizer)


def _refuse_parts(names: Sequence[str]) -> None:
    """Refuse layers that several model-parallel ranks share: how one is cut, its trainer alone knows."""
    ranks = sorted({rank for _, rank in saves.by_rank(names, LAYER_PART)})
    if ranks not in ([], [0]):
        file = next(name for (_, rank), name in saves.by_rank(names, LAYER_PART).items() if rank)
        rule = (
            f"is a part of a layer that {len(ranks)} model-parallel ranks of a pipeline share; how they cut it no file says. "
            "Only GPT-NeoX's and Megatron-DeepSpeed's are joined, and this looks like neither: there are no configs/ of "
            "GPT-NeoX and no word_embeddings.weight in the first layer"
        )
        raise CheckpointError(file, rule)
