"""Reads a rank's weights and puts them into its model: first once, then again from other checkpoints of the same shapes."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from checkpoint import Checkpoint, CheckpointError
from serve.errors import ConfigError
from serve.model.experts import stored_name
from serve.model.linear import Matmul, Product
from serve.model.load import Blueprint, is_stored
from serve.model.pretrained import initialise
from serve.model.shards import ShardOf
from serve.model.weight_memory import WeightMemory


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
        if not is_stored(self._checkpoint, name):
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
        """Give every parameter and buffer its memory and its values for the first time; no other thread may compute meanwhile.

        As many threads as torch has each read a layer and make what computes it, where that copies the weights.

        Raises:
            ConfigError: a file cannot be read.
        """
        threads = torch.get_num_threads() if self._device.type == "cpu" and self._make.copies else 1
        with _several(self._reading(checkpoint, blueprint), threads) as read:
            for filling in read(self._places):
                filling.put()
        _fill_buffers(self._model, self._device)

    def read(self, checkpoint: Checkpoint, blueprint: Blueprint) -> Iterator[Filling]:
        """The values of one place after the other, in this thread.

        Raises:
            ConfigError: a file cannot be read.
        """
        return map(self._reading(checkpoint, blueprint).of, self._places)

    def _reading(self, checkpoint: Checkpoint, blueprint: Blueprint) -> _Reading:
        return _Reading(self._make, SliceReader(checkpoint, blueprint, self._shards, self._device), blueprint.dtype)


class _Reading:
    """Reads places and makes what computes them; those that share no parameter with another may be read by several threads."""

    def __init__(self, make: Maker, reader: SliceReader, dtype: torch.dtype) -> None:
        self._make = make
        self._reader = reader
        self._dtype = dtype
        self._of_thread = threading.local()
        self._filled: dict[str, nn.Parameter] = {}
        """Parameters that several modules have, by the first name."""

    def is_alone(self, place: Place) -> bool:
        """Whether any thread may read it beside others: it shares nothing and is not large."""
        own = place.module._parameters.values()
        num_bytes = sum(value.numel() * self._dtype.itemsize for value in own if value is not None)
        return not place.shared and num_bytes <= Staging.MOST_BYTES

    def of(self, place: Place) -> Filling:
        """What a place is filled with."""
        is_linear = _is_linear(place.module)
        staging = self._staging() if is_linear and "weight" not in place.shared else None
        tensors = {
            name: self._filled[owner].data
            if owner in self._filled
            else self._reader.read(f"{place.path}.{name}", staging if name == "weight" else None)
            for name, owner in place.owners
        }
        matmul = self._make(place.module, tensors["weight"], tensors.get("bias")) if is_linear else None
        parameters: dict[str, nn.Parameter | None] = {}
        for name, owner in place.owners:
            if matmul is not None and name not in place.shared:
                parameters[name] = None
            elif owner in self._filled:
                parameters[name] = self._filled[owner]
            else:
                parameters[name] = value = nn.Parameter(tensors[name], requires_grad=False)
                if name in place.shared:
                    self._filled[owner] = value
        return Filling(place, parameters, matmul)

    def _staging(self) -> Staging | None:
        """This thread's memory for weights of which something is made."""
        if not self._make.copies:
            return None
        if not hasattr(self._of_thread, "staging"):
            self._of_thread.staging = Staging(self._dtype)
        staging: Staging = self._of_thread.staging
        return staging


@contextlib.contextmanager
def _several(reading: _Reading, threads: int) -> Iterator[Callable[[Sequence[Place]], Iterator[Filling]]]:
    """Within, what reads places in their order, a few of them ahead, in threads that each compute alone."""
    if threads == 1:
        yield partial(map, reading.of)
        return

    def begin() -> None:
        torch.set_grad_enabled(False)
        torch.set_num_threads(1)  # of this one alone, and of those that begin later

    def read(places: Sequence[Place]) -> Iterator[Filling]:
        begun: dict[int, Future[Filling]] = {}
        for number, place in enumerate(places):
            for ahead in range(number, min(number + 2 * threads, len(places))):
                if ahead not in begun and reading.is_alone(places[ahead]):
                    begun[ahead] = pool.submit(reading.of, places[ahead])
            yield begun[number].result() if number in begun else reading.of(place)
            begun.pop(number, None)

    pool = ThreadPoolExecutor(threads, thread_name_prefix="weights", initializer=begin)
    try:
        yield read
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)


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
