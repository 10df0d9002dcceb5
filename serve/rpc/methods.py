"""Binds a servicer's methods to gRPC: reads requests, maps errors to statuses, counts how calls end. All in one place."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any, Final, TypeVar, cast

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message

from serve.errors import QueueFull, RequestError
from serve.rpc.audit import Books, Entry, NoBooks
from serve.rpc.context import Context
from serve.rpc.deadlines import is_expired
from serve.rpc.decoding import Malformed, Reader, Unread
from serve.rpc.status import RpcStatus, abort, internal_status, rpc_status
from serve.tracing.seam import CallTrace, NoTracing, Tracing

_log = logging.getLogger(__name__)

Count = Callable[[str, str], None]
"""(method, status code) of a call that has ended."""

Trailers = Callable[[], tuple[tuple[str, str | bytes], ...]]
"""What the end of a call carries beside its status."""

Handler = Callable[[Any, Context], Any]
"""A servicer's method: (request or iterator of requests, context) -> awaitable answer, or asynchronous generator of answers."""

_Request = Message | Malformed | Unread
"""A request as the deserializer leaves it."""

A = TypeVar("A")

_CONSTRUCTORS: Final = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


class Calls:
    """The calls that handlers have and whose end has not left yet. Belongs to the event loop."""

    def __init__(self) -> None:
        self._live: set[asyncio.Future[None]] = set()

    def began(self, context: Context) -> None:
        """A handler has this call until its status was sent."""
        over = asyncio.get_running_loop().create_future()
        self._live.add(over)
        context.add_done_callback(lambda _: self._ended(over))

    async def until_over(self, at_most_seconds: float) -> None:
        """Wait for the calls there are now; those that come meanwhile are not waited for."""
        if self._live:
            await asyncio.wait(tuple(self._live), timeout=at_most_seconds)

    def _ended(self, over: asyncio.Future[None]) -> None:
        self._live.discard(over)
        if not over.done():
            over.set_result(None)


def bind(
    service: ServiceDescriptor,
    servicer: object,
    count: Count | None,
    *,
    bounds: Mapping[str, int],
    most_waiting_bytes: int | None,
    calls: Calls,
    name: str = "",
    refused: Callable[[QueueFull], None] = lambda refusal: None,
    tracing: Tracing | None = None,
    books: Books | None = None,
    trailers: Trailers | None = None,
) -> grpc.GenericRpcHandler[Any, Any]:
    """A handler for every method of ``service``, found on ``servicer`` by name.

    Args:
        bounds: what a request may hold, see ``serve.rpc.bounds.request_bounds``.
        most_waiting_bytes: of large messages that wait to be read, see ``serve.rpc.room.Room``.
        calls: told of every call.
        refused: told of each that there was no room for.
        name: what the service is called, if not by its own name.
        tracing: told of every call that is counted.
        books: kept of every call; none are without it.
        trailers: asked at the end of every call that is served.
        count: called once for every call, however it ends; ``None`` for services that are not counted.
    """
    handlers = {}
    for method in service.methods:
        message_class = message_factory.GetMessageClass(method.input_type)
        reader = Reader(message_class, bounds, most_waiting_bytes=most_waiting_bytes, refused=refused)
        behaviour = _Behaviour(
            method, getattr(servicer, method.name), reader, count, calls, tracing or NoTracing(), books or NoBooks(), trailers
        )
        make = _CONSTRUCTORS[(method.client_streaming, method.server_streaming)]
        handlers[method.name] = make(
            behaviour.stream if method.server_streaming else behaviour.unary,
            request_deserializer=reader.decode,
            response_serializer=message_factory.GetMessageClass(method.output_type).SerializeToString,
        )
    return grpc.method_handlers_generic_handler(name or service.full_name, handlers)


class _Behaviour:
    """One method as gRPC calls it."""

    def __init__(
        self,
        method: MethodDescriptor,
        handler: Handler,
        reader: Reader,
        count: Count | None,
        calls: Calls,
        tracing: Tracing,
        books: Books,
        trailers: Trailers | None,
    ) -> None:
        self._trailers = trailers
        self._method = method
        self._books = books
        self._tracing = tracing
        self._name = f"{method.containing_service.full_name}/{method.name}"
        self._handler = handler
        self._reader = reader
        self._calls = calls
        self._count = count

    async def unary(self, request: _Request, context: Context) -> Message:
        async def run() -> Message:
            answer: Awaitable[Message] = self._handler(await self._read(request), context)
            return await answer

        return await self._guarded(run, context)

    # A coroutine that writes, not a generator: gRPC leaves a generator suspended when its call is cancelled, while this one is
    # told at once.
    async def stream(self, request: _Request | AsyncIterator[_Request], context: Context) -> None:
        async def run() -> None:
            requests: Message | AsyncIterator[Message | Malformed]
            if self._method.client_streaming:
                requests = self._each(cast(AsyncIterator[_Request], request))
            else:
                requests = await self._read(cast(_Request, request))
            async with aclosing(self._handler(requests, context)) as answers:
                async for answer in answers:
                    await context.write(answer)

        await self._guarded(run, context)

    async def _read(self, request: _Request) -> Message:
        message = await self._reader.read(request)
        if isinstance(message, Malformed):
            raise message.error
        return message

    async def _each(self, requests: AsyncIterator[_Request]) -> AsyncIterator[Message | Malformed]:
        async for request in requests:
            yield await self._reader.read(request)

    async def _guarded(self, run: Callable[[], Awaitable[A]], context: Context) -> A:
        """Run the handler; count its call, before the client can know of its end, and end it with the status of its error."""
        self._calls.began(context)
        entry = self._books.entry(self._name, context)
        with self._tracing.call(self._name, context.invocation_metadata) as trace:
            return await self._counted(run, context, (trace, entry))

    async def _counted(self, run: Callable[[], Awaitable[A]], context: Context, told: tuple[CallTrace, Entry]) -> A:
        allowed = context.time_remaining()
        try:
            answer = await run()
        except RequestError as error:
            status = rpc_status(error)
        except asyncio.CancelledError:
            # The client has gone, or gRPC found the deadline passed. Not swallowed: gRPC would leak the call.
            self._ended(_client_code(context, allowed), told)
            raise
        except Exception:
            if context.done():  # a write met a call that was already over
                self._ended(_client_code(context, allowed), told)
                raise
            status = self._bug()
        else:
            self._ended("OK", told)
            if self._trailers is not None:
                context.set_trailing_metadata(self._trailers())
            return answer
        self._ended(status.code.name, told)
        return await abort(context, status)

    def _ended(self, code: str, told: tuple[CallTrace, Entry]) -> None:
        for each in told:
            each.ended(code)
        if self._count is not None:
            self._count(self._method.name, code)

    def _bug(self) -> RpcStatus:
        _log.exception("%s failed", self._method.full_name)
        return internal_status()


def _client_code(context: Context, allowed_seconds: float | None) -> str:
    """The status of a call that its client ended."""
    return "DEADLINE_EXCEEDED" if is_expired(context.time_remaining(), allowed_seconds) else "CANCELLED"
