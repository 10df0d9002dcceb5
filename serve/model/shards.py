"""What part of a whole tensor a rank holds."""

from __future__ import annotations

from dataclasses import dataclass

from serve.model.heads import Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardOf:
    """What part of a whole tensor a rank holds: some pieces of one dimension, in order, and all of the others."""

    full_shape: tuple[int, ...]
    dim: int
    pieces: tuple[Piece, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        width = sum(piece.end - piece.begin for piece in self.pieces)
        return (*self.full_shape[: self.dim], width, *self.full_shape[self.dim + 1 :])
