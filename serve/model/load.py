"""From a checkpoint to a model in memory: built on the ``meta`` device, then filled with this rank's slices alone."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from checkpoint import Checkpoint, CheckpointError
from checkpoint.dtypes import FLOAT_TYPES
from serve.errors import ConfigError
from serve.model.attach import INTERFACE_NAME
from serve.model.checks import check_rope, check_switches
from serve.model.experts import Stack, stacks_of, stored_name
from serve.model.families import Family, as_configured, family_of
from serve.model.pretrained import initialise, new_model, vocabulary_rows
from serve.model.shards import ShardOf


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
        with torch.device("meta"):
            # Eager first: GPT-J and GPT-Neo know no other name while they are built.
            model = new_model(config, dtype, attention="eager")
    except Exception as error:
        raise ConfigError(f"config.json describes no model that can be built: {_one_line(error)}") from error
    model.config._attn_implementation = INTERFACE_NAME
    transposed = _linear_from_conv1d(model) if family.conv1d else frozenset()
    parameters = dict(model.named_parameters())
    stacks = {name: stack for name, stack in stacks_of(family, parameters).items() if not _is_stored(checkpoint, name)}
    expected = {
        stored_name(family, name) if not _is_stored(checkpoint, name) else name: _stored_shape(name, tuple(p.shape), transposed)
        for name, p in parameters.items()
        if name not in stacks
    } | {name: shape for stack in stacks.values() for name, shape in stack.stored()}
    aliases = {
        name: owner
        for owner, parameter in parameters.items()
        for name, other in model.named_parameters(remove_duplicate=False)
        if other is parameter and name != owner
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


def _is_stored(checkpoint: Checkpoint, name: str) -> bool:
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


class SliceReader:
    """Reads this rank's part of each parameter, in the model's type, onto its device."""

    def __init__(
        self, checkpoint: Checkpoint, blueprint: Blueprint, shards: Mapping[str, ShardOf], device: torch.device
    ) -> None:
        self._checkpoint = checkpoint
        self._blueprint = blueprint
        self._shards = shards
        self._device = device

    def read(self, name: str) -> Tensor:
        """The tensor as the model wants it; [out, in] for weights that are stored transposed."""
        transposed = name in self._blueprint.transposed
        shard = self._shards.get(name)
        if name in self._blueprint.stacks:
            return self._blueprint.stacks[name].read(self._read, shard)
        if shard is None:
            tensor = self._read(name, None)
            return tensor.t().contiguous() if transposed else tensor
        # A dimension of the model's [out, in] is the other one of a stored [in, out].
        dim = 1 - shard.dim if transposed else shard.dim
        parts = [self._read(name, (*[slice(None)] * dim, slice(piece.begin, piece.end))) for piece in shard.pieces]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)
        return whole.t().contiguous() if transposed else whole

    def _read(self, name: str, index: tuple[slice, ...] | None) -> Tensor:
        if not _is_stored(self._checkpoint, name):
            name = stored_name(self._blueprint.family, name)
        try:
            return self._checkpoint.read(
                self._checkpoint.resolve(name), index, dtype=self._blueprint.dtype, device=self._device
            )
        except CheckpointError as error:
            raise ConfigError(str(error)) from error


def fill(
    model: PreTrainedModel,
    reader: SliceReader,
    device: torch.device,
    on_linear: Callable[[nn.Module, Tensor, Tensor | None], bool],
) -> None:
    """Give every parameter and buffer of a model on ``meta`` its memory and its values.

    ``on_linear`` is offered each linear layer's weight and bias as soon as they are read; where it returns True it has taken
    them over (packed them, say) and the module keeps no plain weight. Two modules that shared a parameter share it again.
    """
    filled: dict[int, nn.Parameter] = {}
    shared = _shared_parameters(model)
    for path, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        tensors = {}
        for name, parameter in own.items():
            known = filled.get(id(parameter))
            tensors[name] = known.data if known is not None else reader.read(f"{path}.{name}")
        taken = _is_linear(module) and on_linear(module, tensors["weight"], tensors.get("bias"))
        for name, parameter in own.items():
            if taken and id(parameter) not in shared:
                setattr(module, name, None)
                continue
            fresh = filled.get(id(parameter))
            if fresh is None:
                fresh = filled[id(parameter)] = nn.Parameter(tensors[name], requires_grad=False)
            setattr(module, name, fresh)
    _fill_buffers(model, device)


def _shared_parameters(model: nn.Module) -> frozenset[int]:
    counts: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        counts[id(parameter)] = counts.get(id(parameter), 0) + 1
    return frozenset(key for key, count in counts.items() if count > 1)


def _is_linear(module: nn.Module) -> bool:
    """A linear layer, torch's or DeepSpeed's; routers and norms may have weights of two dimensions, too."""
    kinds = {kind.__name__ for kind in type(module).__mro__}
    return isinstance(module, nn.Linear) or ("TensorParallel_Layer" in kinds and "VocabParallelEmbedding" not in kinds)


def _fill_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Compute the buffers that no checkpoint stores (rotary frequencies, sinusoids), by transformers' own initialisers."""
    for module in model.modules():
        missing = [name for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
        if not missing:
            continue
        if "bias" in missing:  # GPT-Neo's mask of all positions by all positions: our attention has no use for it
            module._buffers["bias"] = None
            continue
        for name in missing:
            module._buffers[name] = torch.empty_like(module.get_buffer(name), device=device)
        with _without_parameters(module):
            initialise(model, module)


@contextlib.contextmanager
def _without_parameters(module: nn.Module) -> Iterator[None]:
    """Within, what is written to the module's own parameters is written nowhere: initialisers draw new ones."""
    own = {name: value for name, value in module._parameters.items() if value is not None}
    for name, value in own.items():
        module._parameters[name] = nn.Parameter(torch.empty_like(value, device="meta"), requires_grad=False)
    try:
        yield
    finally:
        module._parameters.update(own)
