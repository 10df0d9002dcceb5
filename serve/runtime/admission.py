"""Who may begin: requests are refused while the server cannot take them, and the others become streams."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from serve.config import ServerConfig
from serve.errors import Loading, QueueFull, ServeError
from serve.metrics import Metrics
from serve.runtime.commands import Add, Drop
from serve.runtime.edition import Edition
from serve.runtime.engine_thread import EngineThread
from serve.runtime.flight import Flight
from serve.runtime.state import ServerState
from serve.runtime.stream import Stream
from serve.types import Generation


class Admission:
    """Starts a stream for every request that it does not refuse. Belongs to the event loop."""

    def __init__(
        self, server: ServerState, flight: Flight, bridge: EngineThread, config: ServerConfig, metrics: Metrics
    ) -> None:
        self._server = server
        self._flight = flight
        self._bridge = bridge
        self._config = config
        self._metrics = metrics

    def start(self, generation: Generation, edition: Edition | None = None) -> Stream:
        """Put a request in the engine's queue.

        Args:
            generation: the request.
            edition: what it was made for; ``None`` if it does not matter.

        Raises:
            Loading, EngineDown, Draining: the server takes no requests now, or serves another edition by now.
            QueueFull: so many requests wait to be looked at that the queue is full beyond doubt.

        The stream's first event may still be ``QueueFull``, ``DuplicateRequest`` or ``InvalidRequest``, from the engine.
        """
        self._refuse_for(self._server.unavailable() or self._mismatch(edition) or self._overload())
        return self._start(generation)

    @contextlib.contextmanager
    def call(self, edition: Edition | None = None) -> Iterator[Callable[[Generation], Stream]]:
        """A call of several requests, in flight as one: a drain waits for it and takes what it starts later.

        Yields:
            What starts one of its requests, and raises as ``start`` does.

        Raises:
            Loading, EngineDown, Draining: as for ``start``.
        """
        self._refuse_for(self._server.unavailable() or self._mismatch(edition))
        with self._flight.call() as call:

            def start(generation: Generation) -> Stream:
                self._refuse_for(call.error or self._overload())
                return self._start(generation)

            yield start

    def _refuse_for(self, reason: ServeError | None) -> None:
        """Raise the reason, if there is one, and count it."""
        if reason is not None:
            self._metrics.rejected(reason)
            raise reason

    def _mismatch(self, edition: Edition | None) -> Loading | None:
        if edition is None or edition is self._server.edition:
            return None
        return Loading("the model was loaded again while this call was read; send it again")

    def _overload(self) -> QueueFull | None:
        limit = self._config.admission.max_queued_requests
        if self._bridge.backlog >= limit + self._config.scheduler.max_num_seqs:
            return QueueFull(f"{limit} requests are waiting already", reason="requests", retry_after_seconds=1.0)
        return None

    def _start(self, generation: Generation) -> Stream:
        stream = Stream(
            generation,
            buffer_events=self._config.rpc.stream_buffer_events,
            slow_reader_seconds=self._config.rpc.slow_reader_seconds,
            abort=lambda stream, error: self._bridge.send(Drop(stream, error)),
            over=self._flight.remove,
        )
        self._flight.add(stream)
        self._bridge.send(Add(generation, stream))
        return stream
