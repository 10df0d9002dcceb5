"""A rank's passes over micro-batches on a CPU, replayed through its heap and its pages (``heap``): what is resident, and when.

Only what comes and goes is replayed. State that lies there during all of training is in large pieces, and counted elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count, zip_longest
from typing import Final

from finetune.forecast.follow import Event, Trace, What
from finetune.forecast.heap import Heap
from finetune.forecast.layout import Layout

_STEPS: Final = 2
_MOST_MICRO_BATCHES: Final = 3
"""Micro-batches of a step that are replayed: after the second nothing changes."""
_SMALL: Final = 256
"""Bytes of what is made beside a parameter and stays: its tensor object, its place in the graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """Bytes at the busiest moment between two gradients, and behind the last one."""

    activations: int
    gathered: int
    """Whole weights of ZeRO-3, and the buffer they come in."""
    gradients: int
    """Whole ones, added up from one micro-batch to the next."""
    bucket: int
    """The part of the gradients' bucket that was written, or lies on pages that were there."""
    gaps: int
    """Freed, and kept by the heap, or as free pages beside a heap that is largest at another moment."""
    bucket_at_end: int
    gradients_at_end: int
    gaps_at_end: int
    """When the backward pass is over."""


def replay(trace: Trace, layout: Layout) -> Resident:
    """Replay two steps of a run on a CPU.

    Args:
        trace: of one micro-batch of the whole model.
    """
    rank = _Rank(trace, layout)
    rank.load()
    for _ in range(_STEPS):
        accumulation = min(layout.accumulation, _MOST_MICRO_BATCHES)
        for _ in range(accumulation):
            rank.micro_batch()
        rank.step()
    return rank.result()


def _saved(trace: Trace) -> set[int]:
    """Storages of the forward pass that are alive when the first gradient is whole."""
    alive: set[int] = set()
    for what, number, _ in trace:
        if what is What.GRADIENT:
            break
        if what is What.MADE:
            alive.add(number)
        elif what is What.FREED:
            alive.discard(number)
    return alive


class _Rank:
    """One rank's heap, and what lies in it.

    In its first pass a process makes much that is small and stays: hooks, places in the graph, what kernels remember. It lies
    between the tensors that wait for the backward pass, so that their gaps do not grow together.

    Whole gradients that wait for the next micro-batch have small parts, too, wherever room was when they were made. While large
    pieces are freed below them the heap cannot shrink, and when they go, into the thread's own store of small pieces, the C
    library does not look whether it could. So its end stays where it was, and all of it is filled in the next pass: from the
    second step on most of the gradients lie in it.
    """

    def __init__(self, trace: Trace, layout: Layout) -> None:
        self._trace, self._layout = trace, layout
        self._heap = Heap(keeps_end=layout.adds_whole)
        self._new = count(1)
        trained = {event.number for event in trace if event.what is What.GRADIENT}
        self._sizes = {event.number: event.size for event in trace if event.what is What.USED}
        self._trained = {number: size for number, size in self._sizes.items() if number in trained}
        self._saved = _saved(trace)
        self._room = layout.weight_bytes * min(layout.bucket, sum(self._trained.values()))
        """Bytes of a bucket, which is no larger than the gradients (``finetune.config.fit_bucket``)."""
        self._activations: dict[int, tuple[int, int]] = {}
        """Storage of the trace -> piece of the heap, bytes."""
        self._gathered: dict[int, int] = {}
        self._arrived: dict[int, tuple[int, set[int]]] = {}
        """Piece that weights came in together -> bytes, those that no module has asked for yet."""
        self._gradients: dict[int, int] = {}
        self._live = {"activations": 0, "gathered": 0, "gradients": 0}
        self._bucket: int | None = None
        """Piece of the bucket that a backward pass has in ZeRO-2. ZeRO-3 has one for good, beside the heap."""
        self._collected = 0
        """Bytes of the gradients that were written to the bucket, as far as it goes."""
        self._passes = 0
        self._busiest: dict[str, int] = {}
        self._most = self._resident = 0
        self._end: dict[str, int] = {}

    # -- what is gathered and given back

    @property
    def _gathers(self) -> bool:
        """One rank alone computes with its part, which is everything."""
        return self._layout.stage == 3 and self._layout.ranks > 1

    def _take(self, size: int, *, followed: bool = False) -> int:
        piece = next(self._new)
        self._heap.take(piece, size, followed=followed)
        return piece

    def load(self) -> None:
        """Weights are made one by one, and then copied to flat memory: what they leave behind is filled with activations."""
        w, layout = self._layout.weight_bytes, self._layout
        pieces = []
        for size in self._trained.values():
            whole = self._take(w * size, followed=True)
            if layout.stage == 3:
                pieces.append(self._take(w * -(-size // layout.shares), followed=True))
                self._heap.give(whole)
            else:
                pieces.append(whole)
            self._take(_SMALL)
        if layout.flattens:
            for piece in pieces:
                self._heap.give(piece)
        self._heap.give_back()

    def _gather(self, numbers: list[int]) -> None:
        """Parts of weights arrive in one piece, from which each weight is copied."""
        w = self._layout.weight_bytes
        missing = [number for number in numbers if number not in self._gathered]
        if not missing:
            return
        arrived = w * sum(self._sizes[number] for number in missing)
        self._arrived[self._take(arrived)] = arrived, {*missing}
        self._live["gathered"] += arrived
        for number in missing:
            self._gathered[number] = self._take(w * self._sizes[number], followed=self._passes == 0)
            self._live["gathered"] += w * self._sizes[number]
        self._look()

    def _comes_to(self, number: int) -> None:
        """A module asks for a weight. What several came in is kept until each of them was asked for."""
        self._gather([number])
        for piece, (size, waiting) in [*self._arrived.items()]:
            waiting.discard(number)
            if not waiting:
                self._heap.give(piece)
                self._live["gathered"] -= size
                del self._arrived[piece]

    # -- a micro-batch

    def micro_batch(self) -> None:
        ahead = self._gathers and self._passes > 0  # the order of the modules is known from the first pass
        if ahead:
            self._gather(list(self._sizes))
        for (what, number, size), following in zip_longest(self._trace, self._trace[1:]):
            if what is What.MADE:
                self._activations[number] = self._take(size, followed=self._passes == 0 and number in self._saved), size
                self._live["activations"] += size
            elif what is What.FREED:
                piece, bytes_ = self._activations.pop(number)
                self._live["activations"] -= bytes_
                self._heap.give(piece)
            elif what is What.USED and self._gathers:
                self._comes_to(number)
            elif what is What.GRADIENT:
                self._gradient(number, size, following=following)
            self._look()
        self._passes += 1
        for number in [*self._gathered]:
            self._release(number)
        self._end = {**self._live, "bucket": self._bucket_bytes, "gaps": self._heap.gap_bytes}
        if self._bucket is not None:
            self._heap.give(self._bucket)
            self._bucket, self._collected = None, 0

    def _gradient(self, number: int, size: int, *, following: Event | None) -> None:
        layout = self._layout
        w = layout.weight_bytes
        if not layout.adds_whole:
            self._collect(w * size)
        elif number not in self._gradients:
            self._gradients[number] = self._made_as(following, w * size)
            self._live["gradients"] += w * size
        if self._gathers:
            self._release(number)

    def _collect(self, size: int) -> None:
        """A gradient goes to the bucket, which is made for the first one of a backward pass."""
        if self._bucket is None and self._layout.stage != 3:
            self._bucket = next(self._new)
            self._heap.take_unwritten(self._bucket, self._room)
        self._collected = min(self._collected + size, max(self._room, size))
        if self._bucket is not None:
            self._heap.write(self._bucket, self._collected)

    @property
    def _bucket_bytes(self) -> int:
        return self._collected if self._bucket is None else self._heap.size_of(self._bucket)

    def _made_as(self, following: Event | None, size: int) -> int:
        """The piece of a gradient that waits: the storage it was made in, which is then not freed, or a copy of a part."""
        own = following.number if following is not None and following.what is What.FREED else None
        if own is None or self._activations[own][1] != size:
            return self._take(size, followed=True)
        piece, _ = self._activations[own]
        self._activations[own] = self._take(0), size
        return piece

    def _release(self, number: int) -> None:
        if number in self._gathered:
            self._heap.give(self._gathered.pop(number))
            self._live["gathered"] -= self._layout.weight_bytes * self._sizes[number]

    def _drop_gradient(self, number: int) -> None:
        self._heap.give(self._gradients.pop(number))
        self._live["gradients"] -= self._layout.weight_bytes * self._sizes[number]

    def step(self) -> None:
        """The optimizer forgets the gradients."""
        for number in [*self._gradients]:
            self._drop_gradient(number)

    def _look(self) -> None:
        resident = self._heap.resident_bytes + (self._collected if self._bucket is None else 0)
        self._resident = max(self._resident, resident)
        in_use = resident - self._heap.free_page_bytes
        if in_use > self._most:
            self._most = in_use
            self._busiest = {**self._live, "bucket": self._bucket_bytes, "gaps": self._heap.gap_bytes}

    def result(self) -> Resident:
        return Resident(
            **{**self._busiest, "gaps": self._busiest["gaps"] + self._resident - self._most},
            bucket_at_end=self._end["bucket"],
            gradients_at_end=self._end["gradients"],
            gaps_at_end=self._end["gaps"],
        )
