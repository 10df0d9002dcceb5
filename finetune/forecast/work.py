"""What one micro-batch computes: operations of products and attention, bytes of everything else, calls. Counted, not timed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.utils._pytree import tree_iter

_COSTLY: Final = (
    "gelu", "silu", "softmax", "exp", "tanh", "sigmoid", "pow", "norm", "sqrt", "cos", "sin",
)  # fmt: skip
"""Parts of the names of operations that compute more than they move."""
_LOOKUPS: Final = ("embedding", "gather", "index", "scatter")
"""They touch as much as they give, not the whole table."""
_DRAWN: Final = "bernoulli"
"""Dropout's random numbers, which one thread draws one after the other."""
_CREATIONS: Final = ("empty", "new_empty", "empty_like", "empty_strided")
_BACKWARD_SQUARES: Final = 2.5
"""Products of an attention's backward pass for each of its forward pass: five in the place of two."""
_KEY_BLOCK: Final = 512
"""Keys that torch's attention kernel for the CPU computes at once (``kvSplitSize`` in ATen's FlashAttentionKernel.cpp). Where
it is causal it leaves out whole blocks alone: up to this length it computes whole squares, as it does with a mask at any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one micro-batch's forward and backward pass computes on one rank, recomputed blocks and output layer included."""

    products: Mapping[int, float]
    """Size -> operations. The size of a product of M x K and K x N is the cube root of M K N."""
    attention: Mapping[int, Mapping[int, float]]
    """Size of a head -> keys -> operations that the attention kernels compute: of a causal one, the blocks that touch the
    triangle."""
    plain_bytes: float
    """Read and written by operations that move more than they compute."""
    costly_bytes: float
    """Bytes read and written by exponentials, norms and other operations that compute more than they move."""
    drawn: float
    """Random numbers."""
    calls: int
    """Operations, views included."""
    tensors: int
    """Weights with a gradient."""


class Tally:
    """Adds up the operations it is shown."""

    def __init__(self) -> None:
        self._products: Counter[int] = Counter()
        self._attention: defaultdict[int, Counter[int]] = defaultdict(Counter)
        self._plain = self._costly = self._drawn = 0.0
        self._calls = 0

    def see(self, func: Any, args: tuple[Any, ...], made: Any) -> None:
        """One operation as torch dispatches it: ``aten`` function, its arguments, what it gave."""
        space, _, name = str(func._schema.name).partition("::")
        if space != "aten":  # a question about a tensor without storage, which a real one answers itself
            return
        self._calls += 1
        given = [value for value in tree_iter(args) if isinstance(value, torch.Tensor)]
        results = [value for value in tree_iter(made) if isinstance(value, torch.Tensor)]
        if func.is_view or name in _CREATIONS:
            return
        if name in ("mm", "bmm", "addmm", "baddbmm"):
            left, right = given[-2:]
            self._product(left.shape[:-2].numel(), left.shape[-2], left.shape[-1], right.shape[-1])
        elif "scaled_dot_product" in name:
            backward = "backward" in name
            query, key = given[1:3] if backward else given[:2]
            causal = any(value is True for value in args)
            pairs = pairs_of(query.shape[-2], key.shape[-2], causal=causal) * query.shape[:-2].numel()
            operations = 4 * pairs * query.shape[-1]
            self._attention[query.shape[-1]][key.shape[-2]] += round(operations * (_BACKWARD_SQUARES if backward else 1))
        elif _DRAWN in name:
            self._drawn += sum(tensor.numel() for tensor in results)
        else:
            moved = 2 * _bytes(results) if any(part in name for part in _LOOKUPS) else _bytes(given) + _bytes(results)
            self.move(moved, costly=any(part in name for part in _COSTLY))

    def move(self, size: float, *, costly: bool = False) -> None:
        """``size`` bytes read or written."""
        if costly:
            self._costly += size
        else:
            self._plain += size

    def head(self, rows: int, chunk: int, hidden: int, vocab: int, *, trained: bool, width: int) -> None:
        """An output layer whose loss is taken ``chunk`` rows at a time (``model.loss``), which a trace does not compute.

        Args:
            width: bytes of an element of its weight.
        """
        for _ in range(3 if trained else 2):
            self._product(1, rows, hidden, vocab, size=_cube_root(chunk * hidden * vocab))
        self.move(2 * 4.0 * rows * vocab, costly=True)  # the exponentials, in place
        self.move((24.0 + (12.0 if width < 4 else 0.0)) * rows * vocab)  # largest, difference, sum, quotient; copies of 16 bits
        if trained:
            self.move(8.0 * vocab * hidden * -(-rows // chunk))  # products of 16 bits lie in the cache

    def _product(self, count: int, rows: int, inner: int, columns: int, *, size: int | None = None) -> None:
        self._products[size or _cube_root(rows * inner * columns)] += 2 * count * rows * inner * columns

    def work(self, *, tensors: int) -> Work:
        """Everything seen so far."""
        return Work(
            products={size: float(operations) for size, operations in sorted(self._products.items())},
            attention={size: {keys: float(count) for keys, count in each.items()} for size, each in self._attention.items()},
            plain_bytes=self._plain,
            costly_bytes=self._costly,
            drawn=self._drawn,
            calls=self._calls,
            tensors=tensors,
        )


def pairs_of(queries: int, keys: int, *, causal: bool) -> int:
    """Pairs of a query and a key that the attention kernel computes for one head."""
    if not causal:
        return queries * keys
    rows = range(0, queries, _KEY_BLOCK)
    return sum(min(_KEY_BLOCK, queries - row) * min(row + _KEY_BLOCK, keys) for row in rows)


def _cube_root(volume: int) -> int:
    root: float = volume ** (1 / 3)
    return max(1, round(root))


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """What is there to be read: of an expanded tensor only what it is expanded from."""
    return sum(min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes()) for tensor in tensors)
