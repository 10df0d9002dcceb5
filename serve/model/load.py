"""From a checkpoint to the model that it is of, built on the ``meta`` device and held against what the checkpoint has."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from checkpoint import Checkpoint, CheckpointError
from checkpoint.dtypes import FLOAT_TYPES
from serve.errors import ConfigError
from serve.model.attach import INTERFACE_NAME
from serve.model.checks import check_rope, check_switches
from serve.model.experts import Stack, stacks_of, stored_name
from serve.model.families import Family, as_configured, family_of
from serve.model.pretrained import new_model_on_meta, vocabulary_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """A model that holds no memory yet, and what the checkpoint must have for it."""

    model: PreTrainedModel
    family: Family
    dtype: torch.dtype
    transposed: frozenset[str]
    """Parameters that the checkpoint stores as [in, out]."""
    stacks: Mapping[str, Stack]
    """Parameters of experts that the checkpoint stores one by one."""
    aliases: Mapping[str, str]
    """Second names of tied parameters, and the names of their owners."""
    stored: frozenset[str]
    """The checkpoint's names of the tensors that the model takes; beside them it may have masks that nothing reads."""
    num_parameters: int


def read_config(checkpoint: Checkpoint) -> tuple[Family, PretrainedConfig]:
    """The architecture of a checkpoint, as transformers' configuration.

    Raises:
        ConfigError: not a family that Tessera serves, or values that its configuration refuses.
    """
    family = family_of(checkpoint.config)
    try:
        checkpoint.check_model()
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    try:
        config = CONFIG_MAPPING[family.name].from_dict(dict(checkpoint.config))
    except Exception as error:  # transformers raises many kinds; all of them mean that config.json is wrong
        raise ConfigError(f"config.json: {_one_line(error)}") from error
    check_rope(config)
    check_switches(config)
    return as_configured(family, config), config


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]


def choose_dtype(checkpoint: Checkpoint, wanted: str) -> torch.dtype:
    """``auto`` is what config.json names, else what most of the weights are stored in."""
    if wanted != "auto":
        return FLOAT_TYPES[wanted]
    named = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
    if named in FLOAT_TYPES:
        return FLOAT_TYPES[str(named)]
    sizes: dict[torch.dtype, int] = {}
    for info in checkpoint.tensors.values():
        sizes[info.dtype] = sizes.get(info.dtype, 0) + math.prod(info.shape)
    stored = max(sizes, key=lambda dtype: sizes[dtype])
    return stored if stored in FLOAT_TYPES.values() else torch.float32


def build_on_meta(checkpoint: Checkpoint, family: Family, config: PretrainedConfig, dtype: torch.dtype) -> Blueprint:
    """Build the model without memory and hold the checkpoint's tensors against it.

    Raises:
        ConfigError: config.json describes no possible model, or the tensors are not those of the model it describes.
    """
    try:
        # Eager first: GPT-J and GPT-Neo know no other name while they are built.
        model = new_model_on_meta(config, dtype, attention="eager")
    except Exception as error:
        raise ConfigError(f"config.json describes no model that can be built: {_one_line(error)}") from error
    model.config._attn_implementation = INTERFACE_NAME
    transposed = _linear_from_conv1d(model) if family.conv1d else frozenset()
    parameters = dict(model.named_parameters())
    stacks = {name: stack for name, stack in stacks_of(family, parameters).items() if not is_stored(checkpoint, name)}
    expected = {
        stored_name(family, name) if not is_stored(checkpoint, name) else name: _stored_shape(name, tuple(p.shape), transposed)
        for name, p in parameters.items()
        if name not in stacks
    } | {name: shape for stack in stacks.values() for name, shape in stack.stored()}
    owners = {id(parameter): name for name, parameter in parameters.items()}
    aliases = {
        name: owners[id(parameter)]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if owners[id(parameter)] != name
    }
    try:
        checkpoint.check_tensors(expected, tied=aliases)
        checkpoint.check_tokenizer(vocabulary_rows(model))
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return Blueprint(
        model=model,
        family=family,
        dtype=dtype,
        transposed=transposed,
        stacks=stacks,
        aliases=aliases,
        stored=frozenset(checkpoint.resolve(name, aliases) for name in expected),
        num_parameters=sum(p.numel() for p in parameters.values()),
    )


def is_stored(checkpoint: Checkpoint, name: str) -> bool:
    """Whether a checkpoint has a tensor of this name, the model's or its own."""
    try:
        checkpoint.resolve(name)
    except CheckpointError:
        return False
    return True


def _stored_shape(name: str, shape: tuple[int, ...], transposed: frozenset[str]) -> tuple[int, ...]:
    return shape[::-1] if name in transposed else shape


def _linear_from_conv1d(model: nn.Module) -> frozenset[str]:
    """Put ``nn.Linear`` in the place of each ``Conv1D``; returns the weights whose stored form is transposed."""
    transposed = set()
    for path, parent in list(model.named_modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Conv1D):
                inputs, outputs = child.weight.shape
                linear = nn.Linear(inputs, outputs, device="meta", dtype=child.weight.dtype)
                setattr(parent, name, linear)
                transposed.add(f"{path}.{name}.weight")
    return frozenset(transposed)


def eos_ids(rows: int, *sources: Mapping[str, Any]) -> tuple[int, ...]:
    """EOS ids of generation_config.json, else of config.json.

    Raises:
        ConfigError: the embedding has no such row, which a family's own vocab_size shows where config.json gives none.
    """
    for source in sources:
        found = source.get("eos_token_id")
        if found is not None:
            ids = tuple(found) if isinstance(found, list) else (int(found),)
            if any(item >= rows for item in ids):
                raise ConfigError(f"eos_token_id is {found}; the embedding has {rows} rows, for ids up to {rows - 1}")
            return ids
    return ()
