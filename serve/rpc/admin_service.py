"""The Admin service: for operators."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Final

from serve.errors import InvalidRequest, NotFound, Unavailable, Violation
from serve.rpc.checks import REQUEST_ID
from serve.rpc.context import Context
from serve.runtime.gateway import Gateway
from serve.runtime.state import State
from serve.types import RequestId
from serve.v1 import admin_pb2

STATE: Final = {
    State.LOADING: admin_pb2.SERVER_STATE_LOADING,
    State.SERVING: admin_pb2.SERVER_STATE_SERVING,
    State.DRAINING: admin_pb2.SERVER_STATE_DRAINING,
    State.DOWN: admin_pb2.SERVER_STATE_DOWN,
    State.STOPPED: admin_pb2.SERVER_STATE_STOPPED,
}
MOST_STEPS: Final = 100
"""Steps that one recording may have."""
MOST_SECONDS: Final = 600
_STEPS, _SECONDS = 10, 60
"""What a recording has that says nothing else."""


class AdminService:
    """Looks into the server and steers it."""

    def __init__(self, gateway: Gateway, abort: Callable[[RequestId], bool]) -> None:
        """
        Args:
            abort: ends a request that the engine does not know by its name; False if there is none either.
        """
        self._gateway = gateway
        self._abort = abort

    async def Abort(self, request: admin_pb2.AbortRequest, context: Context) -> admin_pb2.AbortResponse:
        """End one request, whoever made it.

        Raises:
            InvalidRequest: the id is none.
            NotFound: no live request has it.
        """
        if not REQUEST_ID.fullmatch(request.request_id):
            raise InvalidRequest.of("request_id", "must be 1 to 128 characters, each of A-Z a-z 0-9 . _ : -")
        request_id = RequestId(request.request_id)
        # Both, for several requests may have one name: whatever is ready for the engine when the first of them is there.
        in_engine = self._gateway.abort(request_id)
        if not self._abort(request_id) and not await in_engine:
            raise NotFound(f"no live request is called {request_id!r}")
        return admin_pb2.AbortResponse()

    async def Drain(self, request: admin_pb2.DrainRequest, context: Context) -> admin_pb2.DrainResponse:
        """Take no new requests, and wait for those in flight."""
        await self._gateway.drain()
        return admin_pb2.DrainResponse()

    async def Reload(self, request: admin_pb2.ReloadRequest, context: Context) -> admin_pb2.ReloadResponse:
        """Serve what the model's folder holds now. It goes on when the caller does not wait for it."""
        await self._gateway.reload()
        return admin_pb2.ReloadResponse()

    async def FlushPrefixCache(
        self, request: admin_pb2.FlushPrefixCacheRequest, context: Context
    ) -> admin_pb2.FlushPrefixCacheResponse:
        """Forget cached prefixes."""
        return admin_pb2.FlushPrefixCacheResponse(blocks=await self._gateway.flush_prefix_cache())

    async def Profile(self, request: admin_pb2.ProfileRequest, context: Context) -> AsyncIterator[admin_pb2.ProfilePart]:
        """Have ranks record their next steps."""
        num_ranks = self._gateway.config.model.num_ranks
        _check_profile(request, num_ranks)
        ranks = tuple(request.ranks) or tuple(range(num_ranks))
        parts = self._gateway.profile(request.steps or _STEPS, ranks, request.seconds or _SECONDS)
        async with aclosing(parts):
            async for part in parts:
                yield admin_pb2.ProfilePart(rank=part.rank, steps=part.steps, data=part.data)

    async def GetLoad(self, request: admin_pb2.GetLoadRequest, context: Context) -> admin_pb2.GetLoadResponse:
        """How busy the server is; figures of an engine that is not there are 0."""
        config = self._gateway.config
        load = admin_pb2.GetLoadResponse(
            state=STATE[self._gateway.state],
            max_num_seqs=config.scheduler.max_num_seqs,
            max_queued_requests=config.admission.max_queued_requests,
            max_queued_tokens=config.admission.max_queued_tokens,
        )
        try:
            stats = await self._gateway.load()
        except Unavailable:
            return load
        for name in ("num_running", "num_waiting", "queued_tokens", "kv_blocks_used", "kv_blocks_cached", "kv_blocks_total"):
            setattr(load, name, getattr(stats, name))
        return load


def _check_profile(request: admin_pb2.ProfileRequest, num_ranks: int) -> None:
    """
    Raises:
        InvalidRequest: a field breaks its rule.
    """
    wrong = []
    if request.steps > MOST_STEPS:
        wrong.append(Violation("steps", f"is {request.steps}; it must be 1 to {MOST_STEPS}, or 0 for {_STEPS}"))
    if request.seconds > MOST_SECONDS:
        wrong.append(Violation("seconds", f"is {request.seconds}; it must be 1 to {MOST_SECONDS}, or 0 for {_SECONDS}"))
    if any(rank >= num_ranks for rank in request.ranks) or len(set(request.ranks)) < len(request.ranks):
        wrong.append(Violation("ranks", f"must name ranks of 0 to {num_ranks - 1}, each once"))
    if wrong:
        raise InvalidRequest(wrong)
