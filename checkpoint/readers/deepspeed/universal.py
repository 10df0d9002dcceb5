"""Reads DeepSpeed's universal checkpoints: a folder for each tensor, whose ``fp32.pt`` holds its master weights whole.

Of a model under ZeRO-3 these are flat, and the shapes stand in the engine's files, which are copied beside, with what was not
trained.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from checkpoint.disk.folder import Folder
from checkpoint.errors import CheckpointError
from checkpoint.given import NOTHING_GIVEN, Given
from checkpoint.layout import Stored
from checkpoint.readers.deepspeed import one_save, saves
from checkpoint.readers.deepspeed.adapted import of_model
from checkpoint.readers.deepspeed.client_state import SOUGHT, client_config, client_tokenizer, known_config
from checkpoint.readers.deepspeed.layer_map import by_layers, rename
from checkpoint.readers.deepspeed.saves import MODULE, PARTITIONED_MODEL, UNIVERSAL, Flat, Saved, open_saved
from checkpoint.readers.deepspeed.zero3 import frozen_places, whole_places
from checkpoint.readers.deepspeed.zero12 import module_places, share
from checkpoint.readers.files.pickles import StoredTensor
from checkpoint.readers.weights import OpenFiles, Weights

NAME = "DeepSpeed universal"
LOOKS_LIKE = "zero/NAME/fp32.pt for each tensor, or above them `latest_universal`"
newest_below = saves.newest_below

_WEIGHTS = "fp32.pt"


def recognises(folder: Folder) -> bool:
    """Whether the folder has the folder of the tensors' folders."""
    return (folder.path / UNIVERSAL).is_dir()


def open_weights(folder: Folder, given: Given = NOTHING_GIVEN) -> Weights:
    """Open the file of each tensor's weights and the engine's.

    Raises:
        CheckpointError: a tensor's file is missing, cut short or of another shape than the engine's files say; there is none of
            the engine's files.
    """
    names = folder.names()
    saves.refuse_experts(names)
    inner = folder.below(UNIVERSAL)
    tensors = [name for name in inner.names() if (inner.path / name).is_dir()]
    models = [name for name in names if PARTITIONED_MODEL.fullmatch(name) or MODULE.fullmatch(name)]
    if not tensors or not models:
        what = f"has no folder of a tensor in {UNIVERSAL}" if not tensors else "has no *_model_states.pt of the engine"
        raise CheckpointError(str(folder.path), f"{what}; was the conversion interrupted?")
    with OpenFiles(folder) as files:
        partitioned = any(PARTITIONED_MODEL.fullmatch(name) for name in models)
        if partitioned:
            models = saves.data_parallel_files(names, PARTITIONED_MODEL, "a part of the model")
        saved = [open_saved(files, name) for name in models]
        one_save.check_model_files(saved)
        _refuse_exchanged(saved[0])
        shapes = _shapes(saved)
        places = {
            name: _tensor(open_saved_tensor(files, f"{UNIVERSAL}/{name}/{_WEIGHTS}"), shapes.get(name)) for name in tensors
        }
        _check_all_there(saved[0], shapes, places)
        config = client_config(folder, given, saved[0])
        if partitioned:
            places |= frozen_places(saved)
            places |= whole_places(saved[0], places)
        elif by_layers(places):
            places = rename(places, given.layer_map, UNIVERSAL, known_config(folder, given, config))
        elif len(saved) == 1:
            places = _with_untrained(saved[0], shapes, places)
        saves.check_cover(UNIVERSAL, places)
        facts = saves.trained_with(saved[0]) | {"tensors with master weights": len(tensors)}
        tokenizer = client_tokenizer(folder, given, saved[0])
        weights = Weights(
            files.descriptors, places, UNIVERSAL, config, SOUGHT, step=saves.step_of(saved[0]), facts=facts, tokenizer=tokenizer
        )
        return of_model(weights, folder, given)


def open_saved_tensor(files: OpenFiles, name: str) -> tuple[Saved, StoredTensor]:
    """A file of one tensor, bare or at ``param`` of a table.

    Raises:
        CheckpointError: it holds none.
    """
    saved = open_saved(files, name, bare=True)
    tensor = saved.get("param")
    if not isinstance(tensor, StoredTensor):
        raise CheckpointError(name, "holds no tensor, neither bare nor at param")
    return saved, tensor


def _tensor(found: tuple[Saved, StoredTensor], shape: tuple[int, ...] | None) -> Stored:
    """Where a tensor lies that is stored in its shape or flat."""
    saved, tensor = found
    if shape is None or tensor.shape == shape:
        return saved.whole(saved.file, tensor)
    count = math.prod(shape)
    if tensor.shape != (count,):
        # A vocabulary that was padded for tensor parallelism is stored without the padding.
        if len(tensor.shape) == len(shape) and tensor.shape[1:] == shape[1:]:
            return saved.whole(saved.file, tensor)
        rule = f"holds a tensor of {list(tensor.shape)}; the engine's files make it {list(shape)}"
        raise CheckpointError(saved.file, rule)
    flat = Flat([saves.stretch_of(saved, saved.file, tensor)])
    return Stored(tensor.dtype, shape, tuple(flat.boxes(shape, 0, 0, count)))


def _refuse_exchanged(first: Saved) -> None:
    """Refuse what was converted from ZeRO-1 or 2 with ``round_robin_gradients``.

    The conversion finds parameters by ``param_slice_mappings``, whose order is another one than that of the vectors.
    """
    settings = first.table("ds_config", "zero_optimization")
    if settings.get("round_robin_gradients") and settings.get("stage") in (1, 2) and first.count("dp_world_size") != 1:
        rule = "was trained with round_robin_gradients, under which the conversion exchanges the weights of parameters"
        raise CheckpointError(first.file, f"{rule}: open the save that was converted")


def _shapes(models: list[Saved]) -> dict[str, tuple[int, ...]]:
    """The shapes of the trained tensors; empty where the ranks have different ones, under model parallelism."""
    found: dict[str, tuple[int, ...]] = {}
    first = models[0]
    if any(MODULE.fullmatch(model.file) for model in models[1:]):
        return found
    for group in first.get("param_shapes") or []:
        if not isinstance(group, dict):
            raise CheckpointError(first.file, "has param_shapes that are not tables")
        found |= {name: saves.shape_of(first, name, shape) for name, shape in group.items()}
    return found


def _check_all_there(first: Saved, shapes: Mapping[str, tuple[int, ...]], places: Mapping[str, Stored]) -> None:
    """Every tensor that was trained has its folder."""
    missing = next((name for name in shapes if name not in places), None)
    if missing is not None:
        rule = f"is missing, though {first.file} has the tensor; was the conversion interrupted?"
        raise CheckpointError(f"{UNIVERSAL}/{missing}/{_WEIGHTS}", rule)


def _with_untrained(module: Saved, shapes: Mapping[str, tuple[int, ...]], places: Mapping[str, Stored]) -> dict[str, Stored]:
    """With what the module has beside the trained tensors. A second name of one of those is it, whatever was converted."""
    held = module_places(module)
    trained = {name: places[name] for name in shapes}
    share(module, held, trained)
    return held | dict(places) | trained
