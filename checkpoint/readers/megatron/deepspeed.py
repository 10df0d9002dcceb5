"""Reads the checkpoints of Megatron-DeepSpeed: DeepSpeed's files, with Megatron's names and arguments in them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from checkpoint.disk.folder import Folder
from checkpoint.disk.latest import named_below
from checkpoint.errors import CheckpointError
from checkpoint.given import NOTHING_GIVEN, Given
from checkpoint.readers.files.torch_zip import Archive, table_names
from checkpoint.readers.megatron.args import ALLOWED, Arguments, Shape, arguments, shape_of_deepspeed
from checkpoint.readers.megatron.model import TOKENIZER, Parts, apart, check_version, flat, tokenizer_names, weights_of
from checkpoint.readers.ranks import Part, check_one_step, step_in, tensors_of
from checkpoint.readers.surroundings import find_tokenizer
from checkpoint.readers.weights import OpenFiles, Weights

NAME = "Megatron-DeepSpeed"
LOOKS_LIKE = "mp_rank_00_model_states.pt with Megatron's args, beside it layer_01-model_00-model_states.pt; above it, latest"

_LAYER_FILE = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
_RANK_FILE = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_FIRST_LAYER = 2
"""Before it are a function that has no file, and the embedding."""
_ARGUMENTS, _NESTED, _EMBEDDING = b"argparse", b"language_model", b"word_embeddings.weight"
"""What a rank's file names; what it names too, where the weights are in it; and what layer 1's does where they are not."""


def recognises(folder: Folder) -> bool:
    """Whether Megatron's arguments are in a rank's file and its names beside them or, where there are layers, in the first.

    Layers are counted from 1, but so they are in any pipeline of DeepSpeed that begins with a function. Of a file that is
    missing or broken the other one tells, so that it is missed by name.
    """
    names = folder.names()
    layers: dict[int, str] = {}
    for match in map(_LAYER_FILE.fullmatch, names):
        if match:
            layers.setdefault(int(match[1]), match[0])
    ranks = [name for name in names if _RANK_FILE.fullmatch(name)]
    if not layers:
        return bool(ranks) and all(table_names(folder, ranks[0], word) for word in (_ARGUMENTS, _NESTED))
    if 0 in layers or 1 not in layers:
        return False
    told = [table_names(folder, layers[1], _EMBEDDING), table_names(folder, ranks[0], _ARGUMENTS) if ranks else None]
    return True in told and False not in told


def newest_below(folder: Folder) -> str | None:
    """What ``latest`` names, where that is such a checkpoint."""
    return named_below(folder, recognises)


def open_weights(folder: Folder, given: Given = NOTHING_GIVEN) -> Weights:
    """Open every file with weights, and prove that layers, ranks and arguments agree.

    Raises:
        CheckpointError: a file is missing or broken; a tensor is missing, unknown or of another form; the arguments describe
            a model that transformers does not have.
    """
    names = folder.names()
    piped = {(int(match[1]), int(match[2])): match[0] for match in map(_LAYER_FILE.fullmatch, names) if match}
    ranks = sorted((int(match[1]), match[0]) for match in map(_RANK_FILE.fullmatch, names) if match)
    if not ranks:
        raise CheckpointError("mp_rank_00_model_states.pt", "is missing, which holds the arguments of the run")
    with OpenFiles(folder) as files:
        archive, tree = _opened(files, ranks[0][1])
        args = arguments(tree, ranks[0][1])
        shape = shape_of_deepspeed(args)
        num_ranks = args.count("tensor_model_parallel_size", default=1)
        found: list[Parts] = []
        steps = [(ranks[0][1], step_in(tree, "iteration"))]
        for rank in range(num_ranks):
            if piped:
                found.append(_of_layers(files, piped, rank, args, shape))
                continue
            name = f"mp_rank_{rank:02d}_model_states.pt"
            if rank:
                archive, tree = _opened(files, name)
                steps.append((name, step_in(tree, "iteration")))
            found.append(apart(tensors_of(archive, name, flat(tree.get("module"), name)), name))
        extra = [name for (_, rank), name in piped.items() if rank >= num_ranks]
        if extra or (not piped and len(ranks) != num_ranks):
            rule = f"is of another rank than the {num_ranks} tensor-parallel ones that args gives"
            raise CheckpointError((extra or [ranks[-1][1]])[0], rule)
        tokenizer = find_tokenizer(folder, given, above=True, named=tokenizer_names(args), inside=TOKENIZER)
        check_one_step(steps)
        return weights_of(found, args, shape, files.descriptors, tokenizer, steps[0][1])


def _opened(files: OpenFiles, name: str) -> tuple[Archive, Mapping[Any, Any]]:
    archive = Archive(files[name], name)
    tree = archive.tree(ALLOWED)
    if not isinstance(tree, dict):
        raise CheckpointError(name, f"holds {type(tree).__name__} where a table must stand")
    check_version(tree, name)
    return archive, tree


def _of_layers(files: OpenFiles, piped: Mapping[tuple[int, int], str], rank: int, args: Arguments, shape: Shape) -> Parts:
    """One rank's tensors of the files of layers."""
    numbers = {number for number, _ in piped}
    last = _FIRST_LAYER + shape.num_layers
    wanted = (_FIRST_LAYER - 1, *sorted(numbers - {1}))
    if numbers - {1} != {*range(_FIRST_LAYER, last + 1), *(() if shape.tied else (last + 1,))}:
        rule = f"there are files of layers {sorted(numbers)[:3]} to {max(numbers)}; args.num_layers is {shape.num_layers}"
        raise CheckpointError(args.file, rule)
    parts = Parts()
    for number in wanted:
        name = piped.get((number, rank))
        if name is None:
            raise CheckpointError(f"layer_{number:02d}-model_{rank:02d}-model_states.pt", "is missing")
        table = _table(files, name)
        if number < _FIRST_LAYER:
            parts.embedding = table
        elif number < last:
            parts.layers[number - _FIRST_LAYER] = table
        elif number == last:
            parts.norm = table
        else:
            parts.head = {"weight" if tensor == "lm_head.weight" else tensor: part for tensor, part in table.items()}
    return parts


def _table(files: OpenFiles, name: str) -> dict[str, Part]:
    archive = Archive(files[name], name)
    return tensors_of(archive, name, flat(archive.tree(ALLOWED), name))
