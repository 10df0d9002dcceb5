"""Reads a rank's weights and puts them into its model: first once, then again from other checkpoints of the same shapes."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from checkpoint import Checkpoint
from checkpoint.opening.leases import Leases
from serve.model.linear import Matmul, Panels, Product
from serve.model.load import Blueprint
from serve.model.packed_experts import Mix
from serve.model.pretrained import initialise
from serve.model.shards import ShardOf
from serve.model.slice_reading import SliceReader, Staging

BLOCK_BYTES: Final = 1 << 20
"""A weight that is packed by rows is read in blocks of about this size, which stay in a core's cache until they are packed."""


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
    matmul: Matmul | Mix | None
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

    def begin(self, shape: tuple[int, int], dtype: torch.dtype, *, later: bool = False) -> Panels | None:
        """A weight [O, I] that is made by blocks of rows and then given in place of the plain one; ``None`` where it is made of
        the whole.

        Args:
            later: it is made while its product computes already.
        """
        ...

    def __call__(self, module: nn.Module, weight: Tensor | Panels, bias_O: Tensor | None) -> Matmul | None: ...

    def experts(self, module: nn.Module, read: ReadExpert) -> Mix | None:
        """Makes of stacked experts what computes them, reading one after the other; ``None`` where another module is meant, or
        its ``forward`` is as good."""
        ...


class ReadExpert(Protocol):
    """Reads one expert's part of a module's stack, which is there until the next is read.

    Args:
        name: of the stack, in the module.
        expert: its number.
    """

    def __call__(self, name: str, expert: int) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Waiting:
    """Weights that are used where they lie in their files."""

    panels: list[Panels] = field(default_factory=list)
    """To be packed: their products read plain rows."""
    views: list[Tensor] = field(default_factory=list)
    """To be copied: parameters whose memory is a file's."""
    leases: Leases = field(default_factory=Leases, compare=False)
    """On the files, to be given back when no weight lies there any more."""


class Filler:
    """Fills one rank's model, built on ``meta`` and cut, from a checkpoint; later from others of the same shapes.

    ``make`` is offered each linear layer's weight and bias as soon as they are read; what it makes of them computes the layer,
    and the module keeps no plain weight. Where it copies what it is given, all weights are read into the same memory, one after
    the other. Two modules that shared a parameter share it again.

    With ``later``, weights that lie in a file as the model wants them are not read by ``fill`` but mapped: they are used where
    they are until somebody packs and keeps what ``take_waiting`` gives.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        shards: Mapping[str, ShardOf],
        device: torch.device,
        make: Maker,
        *,
        later: bool = False,
    ) -> None:
        self._model = model
        self._shards = shards
        self._device = device
        self._make = make
        self._places = _places_of(model)
        self._later = later
        self._waiting = Waiting()
        self.num_bytes = sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())
        """What the rank's weights take in the type that they are computed in; compressed ones take less."""

    def fill(self, checkpoint: Checkpoint, blueprint: Blueprint) -> None:
        """Give every parameter and buffer its memory and its values for the first time; no other thread may compute meanwhile.

        As many threads as torch has each read a layer and make what computes it, where that copies the weights; of a large one
        that is made by rows, each reads a part.

        Raises:
            ConfigError: a file cannot be read.
        """
        threads = torch.get_num_threads() if self._device.type == "cpu" and self._make.copies else 1
        later = self._waiting if self._later else None
        with _several(self._reading(checkpoint, blueprint, later), threads) as read:
            for filling in read(self._places):
                filling.put()
        _fill_buffers(self._model, self._device)

    @property
    def waiting_bytes(self) -> int:
        """What of the rank's weights has no memory of its own yet."""
        packed = sum(panels.packed.nbytes for panels in self._waiting.panels)
        return packed + sum(view.nbytes for view in self._waiting.views)

    def take_waiting(self) -> Waiting:
        """The weights that lie in files yet, for whoever packs and keeps them: they are given once."""
        waiting, self._waiting = self._waiting, Waiting()
        return waiting

    def read(self, checkpoint: Checkpoint, blueprint: Blueprint) -> Iterator[Filling]:
        """The values of one place after the other, in this thread.

        Raises:
            ConfigError: a file cannot be read.
        """
        return map(self._reading(checkpoint, blueprint).of, self._places)

    def _reading(self, checkpoint: Checkpoint, blueprint: Blueprint, later: Waiting | None = None) -> _Reading:
        reader = SliceReader(checkpoint, blueprint, self._shards, self._device)
        return _Reading(self._make, reader, blueprint.dtype, later)


class _Reading:
    """Reads places and makes what computes them; those that share no parameter with another may be read by several threads."""

    def __init__(self, make: Maker, reader: SliceReader, dtype: torch.dtype, later: Waiting | None) -> None:
        """
        Args:
            later: where weights go that are left where they lie; ``None``: all are read.
        """
        self._make = make
        self._reader = reader
        self._dtype = dtype
        self._later = later
        self._of_thread = threading.local()
        self._filled: dict[str, nn.Parameter] = {}
        """Parameters that several modules have, by the first name."""
        self.pool: ThreadPoolExecutor | None = None
        """Threads that may read parts of what is too large for one of them."""

    def is_alone(self, place: Place) -> bool:
        """Whether any thread may read it beside others: it shares nothing and is not large."""
        own = place.module._parameters.values()
        num_bytes = sum(value.numel() * self._dtype.itemsize for value in own if value is not None)
        return not place.shared and num_bytes <= Staging.MOST_BYTES

    def of(self, place: Place) -> Filling:
        """What a place is filled with."""
        mix = self._make.experts(place.module, partial(self._read_expert, place))
        if mix is not None:
            return Filling(place, {name: None for name, _ in place.owners}, mix)
        is_linear = _is_linear(place.module)
        alone = is_linear and "weight" not in place.shared
        panels = self._panels(f"{place.path}.weight") if alone else None
        tensors = {
            name: self._filled[owner].data
            if owner in self._filled
            else self._read(f"{place.path}.{name}", self._staging() if alone and name == "weight" else None)
            for name, owner in place.owners
            if panels is None or name != "weight"
        }
        if is_linear and not alone:  # it lies in another module's memory, and so do its rows until they are packed
            plain_OI = tensors["weight"]
            panels = self._packed_later((plain_OI.shape[0], plain_OI.shape[1]), lambda: plain_OI)
        matmul = self._make(place.module, panels or tensors["weight"], tensors.get("bias")) if is_linear else None
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

    def _read_expert(self, place: Place, name: str, expert: int) -> Tensor:
        return self._reader.read_expert(f"{place.path}.{name}", expert, self._staging())

    def _panels(self, name: str) -> Panels | None:
        """A linear layer's weight, packed block by block as it is read, or later; ``None`` where it is made of the whole."""
        outputs, inputs = self._reader.shape(name)
        panels = self._packed_later((outputs, inputs), lambda: self._view(name))
        if panels is not None:
            return panels
        if not self._reader.reads_rows(name):
            return None
        panels = self._make.begin((outputs, inputs), self._dtype)
        if panels is None:
            return None

        def put(begin: int, end: int) -> None:
            staging = self._staging()
            assert staging is not None, "what is packed is a copy"
            block_RI = staging((end - begin, inputs))
            self._reader.read_rows(name, begin, block_RI)
            panels.put(begin, block_RI)

        self._by_rows(put, outputs, inputs)
        return panels

    def _packed_later(self, shape: tuple[int, int], find: Callable[[], Tensor | None]) -> Panels | None:
        """A linear layer's weight that is read where ``find`` finds it until it is packed; ``None`` where it is made now."""
        panels = None if self._later is None else self._make.begin(shape, self._dtype, later=True)
        if self._later is None or panels is None or (plain_OI := find()) is None:
            return None
        panels.read_from(plain_OI)
        self._later.panels.append(panels)
        return panels

    def _read(self, name: str, room: Staging | None) -> Tensor:
        """A parameter as the model wants it; large ones by several threads, or left where they lie."""
        if room is None and self._later is not None and (view := self._large_view(name)) is not None:
            self._later.views.append(view)
            return view
        if room is not None or self.pool is None or not self._reader.reads_rows(name):
            return self._reader.read(name, room)
        rows, width = shape = self._reader.shape(name)
        out = self._reader.new(shape)
        self._by_rows(lambda begin, end: self._reader.read_rows(name, begin, out[begin:end]), rows, width)
        return out

    def _large_view(self, name: str) -> Tensor | None:
        """A parameter of two dimensions where it lies, if it is worth it."""
        is_large = math.prod(self._reader.shape(name)) * self._dtype.itemsize >= BLOCK_BYTES
        return self._view(name) if is_large and self._make.copies else None

    def _view(self, name: str) -> Tensor | None:
        assert self._later is not None, "all are read"
        return self._reader.view(name, self._later.leases)

    def _by_rows(self, read: Callable[[int, int], None], rows: int, width: int) -> None:
        """Call ``read`` with each block of rows."""
        row_bytes = width * self._dtype.itemsize
        step = max(1, BLOCK_BYTES // (row_bytes * Panels.ROWS)) * Panels.ROWS
        blocks = [(begin, min(begin + step, rows)) for begin in range(0, rows, step)]
        if self.pool is None or rows * row_bytes <= Staging.MOST_BYTES:  # by one of its threads, perhaps: it waits for no other
            for begin, end in blocks:
                read(begin, end)
            return
        for _ in self.pool.map(lambda block: read(*block), blocks):
            pass

    def _staging(self) -> Staging | None:
        """This thread's memory for weights of which something is made; ``None`` on a GPU, which makes it of its own memory."""
        if not self._make.copies or not self._reader.on_cpu:
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
    reading.pool = pool
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
