"""Who may call what, in one place: a method that is not in the table is refused."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final

import grpc
import grpc.aio

from serve.errors import NotAuthenticated, NotPermitted, RequestError
from serve.rpc.audit import Books, NoBooks
from serve.rpc.context import Context
from serve.rpc.identity import CALLER, Caller, Identities
from serve.rpc.methods import Count
from serve.rpc.pacing import Pace
from serve.rpc.status import RpcStatus, abort, internal_status, rpc_status

_log = logging.getLogger(__name__)

_SOME: Final = frozenset({"generate", "score"})
_ALL: Final = frozenset({"generate", "score", "admin"})

SCOPES_OF: Final[Mapping[str, frozenset[str] | None]] = {
    "/grpc.health.v1.Health/Check": None,
    "/grpc.health.v1.Health/List": None,
    "/grpc.health.v1.Health/Watch": None,
    # gRPC's own balancing asks for reports without a token, as it asks for health. With tokens they are off unless asked for.
    "/xds.service.orca.v3.OpenRcaService/StreamCoreMetrics": None,
    "/serve.v1.Inference/Generate": frozenset({"generate"}),
    "/serve.v1.Inference/GenerateStream": frozenset({"generate"}),
    "/serve.v1.Inference/GenerateBatch": frozenset({"generate"}),
    "/serve.v1.Inference/Score": frozenset({"score"}),
    "/serve.v1.Tokenizer/Tokenize": _SOME,
    "/serve.v1.Tokenizer/Detokenize": _SOME,
    "/serve.v1.Tokenizer/RenderChat": _SOME,
    "/serve.v1.Models/GetModel": _ALL,
    "/serve.v1.Models/ListModels": _ALL,
    "/serve.v1.Admin/Abort": frozenset({"admin"}),
    "/serve.v1.Admin/Drain": frozenset({"admin"}),
    "/serve.v1.Admin/Reload": frozenset({"admin"}),
    "/serve.v1.Admin/FlushPrefixCache": frozenset({"admin"}),
    "/serve.v1.Admin/Profile": frozenset({"admin"}),
    "/serve.v1.Admin/GetLoad": frozenset({"admin"}),
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": _ALL,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _ALL,
}
"""Method -> scopes of which a token must have one; ``None``: open to everyone."""

_NO_TOKEN: Final = "the call carries no valid token: send it as the metadata 'authorization: Bearer TOKEN'"
_NOT_AUTHENTICATED: Final = rpc_status(NotAuthenticated(_NO_TOKEN))
"""Made once: it is what a flood is answered."""

_READING_SECONDS: Final = 0.1
"""How long the messages of a refused call are read: gRPC's client may take a refusal that overtakes them for INTERNAL."""


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs alone
    """Lets a call pass whose token has the scope of its method; ends every other before a service sees it.

    Those that are refused take turns, so that a flood of them leaves the event loop to the rest.
    """

    def __init__(self, identities: Identities, count: Count, books: Books | None = None) -> None:
        """
        Args:
            count: called for each call that is refused.
            books: kept of these calls, too.
        """
        self._identities = identities
        self._count = count
        self._books = books or NoBooks()
        self._pace = Pace()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """The method's own handler, or one that refuses."""
        method: str = handler_call_details.method
        try:
            caller = self._allowed(method, handler_call_details.invocation_metadata or ())
        except NotAuthenticated:
            status = _NOT_AUTHENTICATED
        except RequestError as error:
            status = rpc_status(error)
        except Exception:
            # gRPC would send the exception's words to the client.
            _log.exception("a caller could not be told")
            status = internal_status()
        else:
            if caller is not None:
                CALLER.set(caller)
            return await continuation(handler_call_details)
        try:
            await self._pace.turn()
        except asyncio.CancelledError:
            # Counted, not written: who has no token could fill the disk with lines.
            self._count(method, "CANCELLED")
            raise
        return _refusal(method, status, self._count, self._books)

    def _allowed(self, method: str, metadata: Any) -> Caller | None:
        """Who calls; ``None`` where everyone may.

        Raises:
            NotAuthenticated: there is no token, or it is nobody's.
            NotPermitted: the token has no scope for the method, or the method is in no table.
        """
        wanted = SCOPES_OF.get(method, frozenset())
        if wanted is None:
            return None
        caller = self._identities.who(bearer_token([value for key, value in metadata if key == "authorization"]))
        if caller is None:
            raise NotAuthenticated(_NO_TOKEN)
        if not wanted & caller.scopes:
            needed = " or ".join(sorted(wanted)) or "no token has"
            raise NotPermitted(f"the token of {caller.name} may not call this method; the scope it needs: {needed}")
        return caller


def bearer_token(values: list[str | bytes]) -> str:
    """The token of the one ``authorization`` header there must be; empty for anything else."""
    if len(values) != 1 or not isinstance(values[0], str):
        return ""
    scheme, _, token = values[0].partition(" ")
    return token.strip(" ") if scheme.lower() == "bearer" else ""


def _refusal(method: str, status: RpcStatus, count: Count, books: Books) -> grpc.RpcMethodHandler[Any, Any]:
    """A handler of all four kinds of method: gRPC treats a single message as a stream of one."""

    async def refuse(requests: AsyncIterator[bytes], context: Context) -> None:
        entry = books.entry(method.removeprefix("/"), context)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_READING_SECONDS):
                async for _ in requests:
                    pass
        count(method, status.code.name)
        entry.ended(status.code.name)
        await abort(context, status)

    return grpc.stream_stream_rpc_method_handler(refuse)
