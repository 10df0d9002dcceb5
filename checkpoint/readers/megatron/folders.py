"""Reads the checkpoints of Megatron-LM: a folder for each tensor- and pipeline-parallel rank, with one file in it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from checkpoint.disk.folder import Folder
from checkpoint.disk.latest import LATEST
from checkpoint.errors import CheckpointError
from checkpoint.given import NOTHING_GIVEN, Given
from checkpoint.readers.files.torch_zip import Archive
from checkpoint.readers.megatron.args import ALLOWED, Arguments, Shape, arguments, shape_of_deepspeed
from checkpoint.readers.megatron.model import TOKENIZER, Parts, apart, check_version, flat, tokenizer_names, weights_of
from checkpoint.readers.ranks import check_one_step, divided, step_in, tensors_of
from checkpoint.readers.surroundings import find_tokenizer
from checkpoint.readers.weights import OpenFiles, Weights

NAME = "Megatron-LM"
LOOKS_LIKE = "mp_rank_00/model_optim_rng.pt; above it, latest_checkpointed_iteration.txt"

_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(_\d{3,})?")
_FILES = ("model_optim_rng.pt", "model_rng.pt")
_NEWEST = "latest_checkpointed_iteration.txt"
_UNEVEN = (
    "pipeline_model_parallel_layout", "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
    "standalone_embedding_stage",
)  # fmt: skip
_UNEVEN_ENDS = (
    "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage",
    "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers",
)  # fmt: skip
"""Settings that make the first or last stage another size."""
_CHUNK = re.compile(r"model(\d+)")


def recognises(folder: Folder) -> bool:
    """Whether the folder has one for each rank, with a file of its weights."""
    return any(_RANK.fullmatch(name) and _file_in(folder, name) is not None for name in folder.names())


def newest_below(folder: Folder) -> str | None:
    """The folder of the iteration that counts; ``None`` where the file that names it is of another layout.

    Raises:
        CheckpointError: the file that names it names none.
    """
    if not folder.has(_NEWEST):
        return None
    said = folder.read_text(_NEWEST, limit=64).strip()
    if said == "release":
        return said
    if not (said.isascii() and said.isdigit()):
        raise CheckpointError(_NEWEST, f"is {said!r}; a number or release is expected")
    name = f"iter_{int(said):07d}"
    # Megatron-DeepSpeed writes the file, too, beside DeepSpeed's own, and no such folder.
    return None if folder.has(LATEST) and not (folder.path / name).is_dir() else name


def open_weights(folder: Folder, given: Given = NOTHING_GIVEN) -> Weights:
    """Open every rank's file, and prove that ranks, stages and arguments agree.

    Raises:
        CheckpointError: a file is missing or broken; a tensor is missing, unknown or of another form; the arguments describe
            a model that transformers does not have, or stages that are not read.
    """
    names = [name for name in folder.names() if _RANK.fullmatch(name)]
    with OpenFiles(folder) as files:
        file, archive, tree = _opened(folder, files, names[0])
        args = arguments(tree, file)
        shape = shape_of_deepspeed(args)  # Megatron-DeepSpeed saves so, too, where it runs without DeepSpeed
        num_ranks, num_stages = _sizes(args, tree)
        found: list[Parts] = []
        steps = [(file, step_in(tree, "iteration"))]
        for rank in range(num_ranks):
            stages = []
            for stage in range(num_stages):
                name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if num_stages > 1 else "")
                if name != names[0]:
                    file, archive, tree = _opened(folder, files, name)
                    steps.append((file, step_in(tree, "iteration")))
                stages.append([apart(table, file) for table in _chunks(archive, file, tree)])
            found.append(_whole(stages, args, shape))
        if len(names) != num_ranks * num_stages:
            rule = f"there are {len(names)} folders of ranks; by args there are {num_ranks} x {num_stages}"
            raise CheckpointError(names[-1], rule)
        tokenizer = find_tokenizer(folder, given, above=True, named=tokenizer_names(args), inside=TOKENIZER)
        check_one_step(steps)
        return weights_of(found, args, shape, files.descriptors, tokenizer, steps[0][1])


def _file_in(folder: Folder, name: str) -> str | None:
    return next((file for file in _FILES if (folder.path / name / file).is_file()), None)


def _opened(folder: Folder, files: OpenFiles, name: str) -> tuple[str, Archive, Mapping[Any, Any]]:
    file = f"{name}/{_file_in(folder, name) or _FILES[0]}"
    archive = Archive(files[file], file)
    tree = archive.tree(ALLOWED)
    if not isinstance(tree, dict):
        raise CheckpointError(file, f"holds {type(tree).__name__} where a table must stand")
    check_version(tree, file)
    return file, archive, tree


def _sizes(args: Arguments, tree: Mapping[Any, Any]) -> tuple[int, int]:
    """Tensor-parallel ranks and stages; how layers are spread over stages must be one of the ways that are read."""
    for key in _UNEVEN:
        if args.values.get(key):
            args.refuse(key, "layers are spread over stages in a way that is not read")
    if args.count("expert_model_parallel_size", default=1) > 1:
        args.refuse("expert_model_parallel_size", "mixtures of experts are not read")
    chunks = sum(1 for key in tree if isinstance(key, str) and _CHUNK.fullmatch(key))
    for key in _UNEVEN_ENDS if chunks > 1 else ():
        if args.values.get(key) is not None:
            args.refuse(key, "stages of several parts are read where all have as many layers")
    return args.count("tensor_model_parallel_size", "model_parallel_size", default=1), args.count(
        "pipeline_model_parallel_size", default=1
    )


def _chunks(archive: Archive, file: str, tree: Mapping[Any, Any]) -> list[dict[str, tuple[str, Any]]]:
    """The tables of a stage: one, or one for each of the parts it has in turn with the other stages."""
    numbers = sorted(int(match[1]) for key in tree if isinstance(key, str) and (match := _CHUNK.fullmatch(key)))
    keys = [f"model{number}" for number in numbers] or ["model"]
    if numbers and numbers != list(range(len(numbers))):
        raise CheckpointError(file, f"has parts {numbers} of a stage; they must be numbered from 0")
    if keys[0] not in tree:
        raise CheckpointError(file, "holds no model")
    return [tensors_of(archive, file, flat(tree[key], file)) for key in keys]


def _whole(stages: list[list[Parts]], args: Arguments, shape: Shape) -> Parts:
    """What all stages have of the model on one tensor-parallel rank, with layers numbered from its first.

    A stage counts its layers from 0. Stages of several parts take turns: all first parts, then all second ones.
    """
    num_chunks = len(stages[0])
    if any(len(stage) != num_chunks for stage in stages):
        raise CheckpointError(args.file, "stages have different numbers of parts")
    if num_chunks > 1:
        divided(shape.num_layers, len(stages) * num_chunks, "layers", args.file)
    whole = Parts()
    begin = 0
    for chunk in range(num_chunks):
        for stage in stages:
            parts = stage[chunk]
            if set(parts.layers) != set(range(len(parts.layers))):
                raise CheckpointError(args.file, f"a stage has layers {sorted(parts.layers)[:8]}; they must be numbered from 0")
            if num_chunks > 1 and len(parts.layers) * num_chunks * len(stages) != shape.num_layers:
                raise CheckpointError(args.file, "stages of several parts are read where all have as many layers")
            whole.layers |= {begin + number: table for number, table in parts.layers.items()}
            begin += len(parts.layers)
            whole.embedding = whole.embedding or parts.embedding
            whole.norm = whole.norm or parts.norm
            whole.head = parts.head or whole.head
    return whole
