"""From a checkpoint to a model in memory: built on the ``meta`` device, then filled with this rank's slices alone."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

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
from serve.model.linear import Matmul, Product
from serve.model.pretrained import initialise, new_model_on_meta, vocabulary_rows
from serve.model.shards import ShardOf
from serve.model.weight_memory import WeightMemory


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
    stacks = {name: stack for name, stack in stacks_of(family, parameters).items() if not _is_stored(checkpoint, name)}
    expected = {
        stored_name(family, name) if not _is_stored(checkpoint, name) else name: _stored_shape(name, tuple(p.shape), transposed)
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


class Room(Protocol):
    """Makes a tensor [shape] of the model's type, on its device, that is to be written to."""

    def __call__(self, shape: tuple[int, ...]) -> Tensor: ...


class Staging:
    """Memory that one weight after another is read into, where only what is made of each is kept.

    Memory that was never touched costs as much as reading into it. What is larger than ``MOST_BYTES`` gets memory of its own,
    which is free again before the next is read.
    """

    MOST_BYTES: Final = 64 << 20

    def __init__(self, dtype: torch.dtype) -> None:
        self._memory = torch.empty(0, dtype=dtype)

    def __call__(self, shape: tuple[int, ...]) -> Tensor:
        count = math.prod(shape)
        if count * self._memory.itemsize > self.MOST_BYTES:
            return torch.empty(shape, dtype=self._memory.dtype)
        if count > self._memory.numel():
            self._memory = torch.empty(count, dtype=self._memory.dtype)
        return self._memory[:count].view(shape)


class SliceReader:
    """Reads this rank's part of each parameter, in the model's type, onto its device."""

    def __init__(
        self, checkpoint: Checkpoint, blueprint: Blueprint, shards: Mapping[str, ShardOf], device: torch.device
    ) -> None:
        self._checkpoint = checkpoint
        self._blueprint = blueprint
        self._shards = shards
        self._device = device
        self._memory = WeightMemory()

    def read(self, name: str, room: Room | None = None) -> Tensor:
        """The tensor as the model wants it; [out, in] for weights that are stored transposed.

        Args:
            room: where it is read to; a new tensor without it, and for stacks of experts.
        """
        shard = self._shards.get(name)
        if name in self._blueprint.stacks:
            return self._blueprint.stacks[name].read(self._read, shard)
        transposed, stored = name in self._blueprint.transposed, self._stored(name)
        whole = self._checkpoint.tensors[stored].shape
        shape = shard.shape if shard is not None else whole[::-1] if transposed else whole
        out = self._new(shape) if room is None else room(shape)
        # A dimension of the model's [out, in] is the other one of a stored [in, out].
        target = out.t() if transposed else out
        if shard is None:
            self._fill(stored, None, target)
            return out
        dim, begin = 1 - shard.dim if transposed else shard.dim, 0
        for piece in shard.pieces:
            width = piece.end - piece.begin
            index = (*[slice(None)] * dim, slice(piece.begin, piece.end))
            self._fill(stored, index, target.narrow(dim, begin, width))
            begin += width
        return out

    def _new(self, shape: tuple[int, ...]) -> Tensor:
        on_cpu, dtype = self._device.type == "cpu", self._blueprint.dtype
        return self._memory.empty(shape, dtype) if on_cpu else torch.empty(shape, dtype=dtype, device=self._device)

    def _stored(self, name: str) -> str:
        """The checkpoint's name of a parameter."""
        if not _is_stored(self._checkpoint, name):
            name = stored_name(self._blueprint.family, name)
        try:
            return self._checkpoint.resolve(name, self._blueprint.aliases)  # a stage may have the alias alone
        except CheckpointError as error:
            raise ConfigError(str(error)) from error

    def _fill(self, stored: str, index: tuple[slice, ...] | None, out: Tensor) -> None:
        try:
            self._checkpoint.read(stored, index, out=out)
        except CheckpointError as error:
            raise ConfigError(str(error)) from error

    def _read(self, name: str, index: tuple[slice, ...] | None) -> Tensor:
        try:
            return self._checkpoint.read(self._stored(name), index, dtype=self._blueprint.dtype, device=self._device)
        except CheckpointError as error:
            raise ConfigError(str(error)) from error


@dataclass(frozen=True, slots=True)
class Place:
    """A module with parameters of its own, as it was before it was filled."""

    path: str
    module: nn.Module
    owners: tuple[tuple[str, str], ...]
    """Each parameter's name in the module, and the first name it has in the model: another module's where it is tied."""
    shared: frozenset[str]
    """Names in the module of parameters that other modules have, too."""


@dataclass(frozen=True, slots=True)
class Filling:
    """What computes one place of the model: its parameters, or a packed product."""

    place: Place
    parameters: Mapping[str, nn.Parameter | None]
    """By their names in the module; ``None`` where the values are in ``matmul``."""
    matmul: Matmul | None
    """What computes the layer, if that is not the module's own ``forward``."""

    def put(self) -> Filling:
        """Compute with these values from now on. Returns those before, which can be put back."""
        module, product = self.place.module, self.place.module.__dict__.get("forward")
        before = Filling(
            self.place,
            {name: module._parameters[name] for name in self.parameters},
            product.matmul if isinstance(product, Product) else None,
        )
        for name, value in self.parameters.items():
            setattr(module, name, value)
        if isinstance(product, Product) and self.matmul is not None:
            product.matmul = self.matmul
        elif self.matmul is not None:
            module.forward = Product(self.matmul)
        return before


class Maker(Protocol):
    """Makes of a linear layer's weight [O, I] and bias [O] what computes it; ``None`` where its ``forward`` is as good."""

    @property
    def copies(self) -> bool:
        """Whether something is made of every layer that does not hold the weight it was made of."""
        ...

    def __call__(self, module: nn.Module, weight_OI: Tensor, bias_O: Tensor | None) -> Matmul | None: ...


class Filler:
    """Fills one rank's model, built on ``meta`` and cut, from a checkpoint; later from others of the same shapes.

    ``make`` is offered each linear layer's weight and bias as soon as they are read; what it makes of them computes the layer,
    and the module keeps no plain weight. Where it copies what it is given, all weights are read into the same memory, one after
    the other. Two modules that shared a parameter share it again.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        shards: Mapping[str, ShardOf],
        device: torch.device,
        make: Maker,
    ) -> None:
        self._model = model
        self._shards = shards
        self._device = device
        self._make = make
        self._places = _places_of(model)
        self.num_bytes = sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())
        """What the rank's weights take."""

    def fill(self, checkpoint: Checkpoint, blueprint: Blueprint) -> None:
        """Give every parameter and buffer its memory and its values for the first time."""
        for filling in self.read(checkpoint, blueprint):
            filling.put()
        _fill_buffers(self._model, self._device)

    def read(self, checkpoint: Checkpoint, blueprint: Blueprint) -> Iterator[Filling]:
        """The values of one place after the other.

        Raises:
            ConfigError: a file cannot be read.
        """
        reader = SliceReader(checkpoint, blueprint, self._shards, self._device)
        staging = Staging(blueprint.dtype) if self._make.copies else None
        filled: dict[str, nn.Parameter] = {}
        for place in self._places:
            made = frozenset(("weight",)) - place.shared if _is_linear(place.module) else frozenset()
            tensors = {
                name: filled[owner].data
                if owner in filled
                else reader.read(f"{place.path}.{name}", staging if name in made else None)
                for name, owner in place.owners
            }
            matmul = self._make(place.module, tensors["weight"], tensors.get("bias")) if _is_linear(place.module) else None
            parameters: dict[str, nn.Parameter | None] = {}
            for name, owner in place.owners:
                if matmul is not None and name not in place.shared:
                    parameters[name] = None
                    continue
                if owner not in filled:
                    filled[owner] = nn.Parameter(tensors[name], requires_grad=False)
                parameters[name] = filled[owner]
            yield Filling(place, parameters, matmul)


def _places_of(model: nn.Module) -> tuple[Place, ...]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    places = []
    for path, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if own:
            shared = frozenset(name for name, parameter in own.items() if len(names[id(parameter)]) > 1)
            owners = tuple((name, names[id(parameter)][0]) for name, parameter in own.items())
            places.append(Place(path, module, owners, shared))
    return tuple(places)


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
            unset = module.get_buffer(name)
            module._buffers[name] = torch.empty(unset.shape, dtype=unset.dtype, device=device)
        with _without_parameters(module):
            initialise(model, module)


@contextlib.contextmanager
def _without_parameters(module: nn.Module) -> Iterator[None]:
    """Within, what is written to the module's own parameters is written nowhere: initialisers draw new ones."""
    own = {name: value for name, value in module._parameters.items() if value is not None}
    for name, value in own.items():
        module._parameters[name] = nn.Parameter(torch.empty(value.shape, dtype=value.dtype, device="meta"), requires_grad=False)
    try:
        yield
    finally:
        module._parameters.update(own)
