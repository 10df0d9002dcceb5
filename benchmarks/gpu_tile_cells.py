"""The launches of which ``gpu_tiles`` tries other tiles: attention and layers of whole numbers as a server has them.

A tile is what a kernel is compiled with and launched by, as numbers by name: those of ``serve.model.cuda.tiling.Shape`` with
``splits``, or of ``serve.model.cuda.linear.LinearShape``. It is put in the place of what chooses tiles while a cell is
launched; the kernels and what calls them are the server's own.

To be imported when it is decided whether Triton interprets the kernels (``TRITON_INTERPRET``).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Protocol
from unittest.mock import patch

import torch
from torch import Tensor

from serve.model.attention import LayerCache, Rotary, StepLayout, narrowed
from serve.model.cuda import backend, linear
from serve.model.cuda.tiling import Shape, shape_of, splits_for
from serve.model.quantized import BITS

BLOCK_TOKENS: Final = 16
MOST_COPIES: Final = 64

Tile = Mapping[str, int]
Launch = Callable[[int], Tensor]
"""Launches a cell with one of its copies, by number; what it computes."""


@dataclass(frozen=True, slots=True)
class Where:
    """The device, and how much of it is gone through before anything is read a second time."""

    device: str
    processors: int
    """Multiprocessors."""
    ring_bytes: int
    """More than its second-level cache holds, so that each launch reads from the memory, as in a server. At least one copy."""

    def copies(self, num_bytes: int) -> int:
        """Of something that is read by a launch."""
        return max(1, min(MOST_COPIES, -(-self.ring_bytes // num_bytes)))


class Cell(Protocol):
    """One launch, with copies of what it reads."""

    name: str
    copies: int

    def shaped(self, tile: Tile) -> Any:
        """A context in which the cell is launched by a tile: the ``Launch``."""


class Kind(Protocol):
    """Launches for which one tile is chosen."""

    @property
    def name(self) -> str: ...

    @property
    def axes(self) -> dict[str, tuple[int, ...]]:
        """The values that are tried of each number of a tile."""

    def in_use(self, processors: int) -> Tile:
        """The tile that the server takes."""

    def cells(self, where: Where) -> Sequence[Cell]:
        """Its launches, with random numbers on the device.

        Raises:
            torch.OutOfMemoryError: they have no room.
        """


@dataclass(frozen=True, slots=True)
class Attention:
    """A layer's attention in one phase: what ``TritonBackend.attend`` launches, with rotary angles."""

    model: str
    heads: int
    kv_heads: int
    head_dim: int
    turned: int
    spans: tuple[tuple[int, int], ...]
    """Sequences, and positions of each: with a token each behind them in decoding, or all of them tokens of the step."""
    long: bool = False
    fp8: bool = False
    tried: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Axes, where not those of the phase."""
    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        phase = "prompts" if self.long else "decoding"
        return f"attention of {self.model}, {phase}{', fp8 cache' if self.fp8 else ''}"

    @property
    def axes(self) -> dict[str, tuple[int, ...]]:
        if self.tried:
            return dict(self.tried)
        least = self._shape().heads
        rows = tuple(count for count in ((32, 64, 128) if self.long else (16, 32, 64)) if count >= least)
        axes: dict[str, tuple[int, ...]] = {
            "rows": rows,
            "positions": (16, 32, 64, 128),
            "num_warps": (2, 4, 8),
            "num_stages": (1, 2, 3, 4),
        }
        return axes if self.long else axes | {"splits": (1, 2, 4, 8, 16, 32)}

    def _shape(self) -> Shape:
        return shape_of(self.dtype, self.head_dim, self.heads // self.kv_heads, long=self.long, fp8=self.fp8)

    def in_use(self, processors: int) -> Tile:
        shape = self._shape()
        tile = {name: asdict(shape)[name] for name in ("rows", "positions", "num_warps", "num_stages")}
        if self.long:
            return tile
        parts = -(-(self.heads // self.kv_heads) // shape.heads)
        return tile | {"splits": splits_for(self.kv_heads * parts, processors)}

    def cells(self, where: Where) -> list[AttentionCell]:
        return [AttentionCell(self, *span, where) for span in self.spans]

    def shape(self, tile: Tile) -> Shape:
        """As the kernel is compiled by a tile."""
        return replace(self._shape(), **{name: number for name, number in tile.items() if name != "splits"})


class AttentionCell:
    """So many sequences of one length."""

    def __init__(self, kind: Attention, sequences: int, positions: int, where: Where) -> None:
        self.name = f"{sequences} x {positions}"
        self._kind, self._where = kind, where
        torch.manual_seed(0)
        tokens = positions if kind.long else 1
        self._layout = _laid_out(sequences, positions, tokens, where.device)
        shape = (sequences * -(-positions // BLOCK_TOKENS), kind.kv_heads, BLOCK_TOKENS, kind.head_dim)
        self.copies = where.copies(2 * torch.Size(shape).numel() * (1 if kind.fp8 else kind.dtype.itemsize))

        def made(*sizes: int) -> Tensor:
            return torch.randn(*sizes, dtype=kind.dtype, device=where.device)

        def kept() -> Tensor:
            return narrowed(made(*shape)) if kind.fp8 else made(*shape)

        self._caches = [LayerCache(keys=kept().transpose(2, 3), values=kept()) for _ in range(self.copies)]
        count = sequences * tokens
        self._query_THD = made(count, kind.heads, kind.head_dim)
        self._key_TGD, self._value_TGD = (made(count, kind.kv_heads, kind.head_dim) for _ in range(2))
        angles = torch.outer(self._layout.positions.float(), 0.8 ** torch.arange(kind.turned // 2, device=where.device))
        angles = angles.repeat(1, 2).to(kind.dtype)
        self._rotary = Rotary(angles.cos(), angles.sin(), kind.turned)

    @contextmanager
    def shaped(self, tile: Tile) -> Iterator[Launch]:
        """See ``Cell``."""
        shape = self._kind.shape(tile)
        by_tile = backend.TritonBackend(self._where.processors, splits=tile.get("splits"))

        def chosen(*given: Any, long: bool, **facts: Any) -> Shape:
            return shape if long == self._kind.long else shape_of(*given, long=long, **facts)

        def launch(number: int) -> Tensor:
            return by_tile.attend(
                self._query_THD, self._key_TGD, self._value_TGD, self._caches[number % self.copies], self._layout,
                scale=self._kind.head_dim**-0.5, window=0, rotary=self._rotary,
            )  # fmt: skip

        with patch.object(backend, "shape_of", chosen):
            yield launch


def _laid_out(sequences: int, positions: int, tokens: int, device: str) -> StepLayout:
    """The last ``tokens`` of each sequence as a step, in blocks that lie anywhere."""
    width = -(-positions // BLOCK_TOKENS)
    blocks = list(range(sequences * width))
    random.Random(0).shuffle(blocks)
    tables = torch.tensor(blocks, dtype=torch.int32).view(sequences, width)
    places = torch.arange(positions - tokens, positions)
    slots = tables[:, places // BLOCK_TOKENS].long() * BLOCK_TOKENS + places % BLOCK_TOKENS
    return StepLayout(
        slots=slots.flatten().to(device),
        positions=places.repeat(sequences).to(device, torch.int32),
        query_starts=tuple(range(0, (sequences + 1) * tokens, tokens)),
        context_lengths=(positions,) * sequences,
        block_tables=tables.to(device),
        table_rows=tuple(range(sequences)),
    )


@dataclass(frozen=True, slots=True)
class Linear:
    """Layers of whole numbers at so many rows: what ``whole_number_packer`` makes launches."""

    quantization: str
    rows: tuple[int, ...]
    """All few or all many: those for which one shape is chosen."""
    layers: tuple[tuple[int, int], ...]
    """Outputs and inputs."""
    tried: tuple[tuple[str, tuple[int, ...]], ...] = ()
    dtype: torch.dtype = torch.bfloat16
    group: int = 32

    @property
    def name(self) -> str:
        return f"layers in {self.quantization}, {'few' if max(self.rows) <= 16 else 'many'} rows"

    @property
    def axes(self) -> dict[str, tuple[int, ...]]:
        if self.tried:
            return dict(self.tried)
        few = max(self.rows) <= 16
        axes: dict[str, tuple[int, ...]] = {"rows": (16, 32) if few else (32, 64, 128), "outputs": (16, 32, 64, 128)}
        axes |= {"inputs": (64, 128, 256, 512)} if self.quantization == "int8" else {"spans": (1, 2, 4, 8)}
        return axes | {"num_warps": (2, 4, 8), "num_stages": (1, 2, 3, 4)}

    def in_use(self, processors: int) -> Tile:  # the same on every device
        return asdict(linear.linear_shape(self.dtype, BITS[self.quantization], max(self.rows)))

    def cells(self, where: Where) -> list[LinearCell]:
        return [LinearCell(self, rows, *layer, where) for layer in self.layers for rows in self.rows]


class LinearCell:
    """One layer at one number of rows."""

    def __init__(self, kind: Linear, rows: int, outputs: int, inputs: int, where: Where) -> None:
        self.name = f"{rows} x {inputs} to {outputs}"
        torch.manual_seed(0)
        self.copies = where.copies(outputs * inputs * BITS[kind.quantization] // 8)
        pack = linear.whole_number_packer(kind.quantization, kind.group)
        bias_O = torch.randn(outputs, dtype=kind.dtype, device=where.device)
        self._layers = [
            pack(torch.randn(outputs, inputs, dtype=kind.dtype, device=where.device), bias_O) for _ in range(self.copies)
        ]
        self._rows_MI = torch.randn(rows, inputs, dtype=kind.dtype, device=where.device)

    @contextmanager
    def shaped(self, tile: Tile) -> Iterator[Launch]:
        """See ``Cell``."""
        shape = linear.LinearShape(**tile)
        with patch.object(linear, "linear_shape", lambda *_: shape):
            yield lambda number: self._layers[number % self.copies](self._rows_MI)
