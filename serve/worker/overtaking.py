"""A plan that is to be computed before the one that is being computed, on a CPU's only rank."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from serve.model.recording import NO_SOCKET
from serve.worker import wire


class Overtaken(Exception):
    """Another plan goes first. Nothing of the step in progress counts: it is computed again."""


class Overtaking:
    """Knows where such a plan comes, and who computes it.

    The only rank looks once in each layer, so a first token waits for a part of a step instead of all of it. What is written of
    the step's keys and values is written again later, into blocks that the other plan has none of. How often a step gives way,
    the server decides; a plan that has overtaken is computed to its end.
    """

    def __init__(self) -> None:
        self._connection: socket.socket | None = None
        self.compute_other: Callable[[], None] = _nobody
        """Receives the other plan, computes it and answers."""

    def begin(self, connection: socket.socket, compute_other: Callable[[], None]) -> None:
        """From now on plans may overtake, which come over the connection as ``wire.send`` marks them."""
        self._connection, self.compute_other = connection, compute_other

    @property
    def descriptor(self) -> int:
        """The connection's, for kernels that look by themselves; ``NO_SOCKET`` while no plan may overtake."""
        return NO_SOCKET if self._connection is None else self._connection.fileno()

    def look(self) -> None:
        """
        Raises:
            Overtaken: such a plan has come.
        """
        if self._connection is not None and wire.is_overtaken(self._connection):
            raise Overtaken

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Within, none may."""
        connection, self._connection = self._connection, None
        try:
            yield
        finally:
            self._connection = connection


def _nobody() -> None:
    raise AssertionError("a plan overtakes, and nobody computes it")
