"""The one place where errors become gRPC status codes, with machine-readable details beside the message.

Every error carries ``google.rpc.ErrorInfo`` with a stable reason; InvalidRequest also ``BadRequest`` with its field violations,
QueueFull and Draining also ``RetryInfo``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NoReturn

from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc import StatusCode

from serve import errors
from serve.rpc.context import Context

STATUS_OF: Final[Mapping[type[errors.RequestError], StatusCode]] = {
    errors.InvalidRequest: StatusCode.INVALID_ARGUMENT,  # the client's mistake; retrying cannot help
    errors.NotFound: StatusCode.NOT_FOUND,
    errors.DuplicateRequest: StatusCode.ALREADY_EXISTS,
    errors.QueueFull: StatusCode.RESOURCE_EXHAUSTED,  # ours; retry later, or elsewhere
    errors.PutOut: StatusCode.RESOURCE_EXHAUSTED,
    errors.TenantLimited: StatusCode.RESOURCE_EXHAUSTED,
    errors.SlowReader: StatusCode.RESOURCE_EXHAUSTED,
    errors.DeadlineExpired: StatusCode.DEADLINE_EXCEEDED,
    errors.RequestAborted: StatusCode.CANCELLED,
    errors.FeatureOff: StatusCode.FAILED_PRECONDITION,
    errors.ReloadRefused: StatusCode.FAILED_PRECONDITION,
    errors.ProfileRefused: StatusCode.FAILED_PRECONDITION,
    errors.NotAuthenticated: StatusCode.UNAUTHENTICATED,
    errors.NotPermitted: StatusCode.PERMISSION_DENIED,
    errors.Unavailable: StatusCode.UNAVAILABLE,  # clients retry exactly this one by themselves
    errors.Loading: StatusCode.UNAVAILABLE,
    errors.Draining: StatusCode.UNAVAILABLE,
    errors.EngineDown: StatusCode.UNAVAILABLE,
    errors.RequestBroke: StatusCode.INTERNAL,
    errors.NotFinite: StatusCode.INTERNAL,
}
"""Status of each error; a test proves that none is missing."""

RETRIED_LATER: Final = (errors.QueueFull, errors.Draining)
"""Errors that say when a retry is worth it. gRPC's own retries obey the pushback in their trailers."""

DOMAIN: Final = "tessera"
DETAILS_KEY: Final = "grpc-status-details-bin"
PUSHBACK_KEY: Final = "grpc-retry-pushback-ms"

MAX_VIOLATIONS: Final = 12
MAX_MESSAGE_CHARACTERS: Final = 600
"""Status and details travel in trailers, for which clients accept about 8 KiB."""


@dataclass(frozen=True, slots=True)
class RpcStatus:
    """How a call ends when it does not end well."""

    code: StatusCode
    message: str
    trailers: tuple[tuple[str, str | bytes], ...]


def rpc_status(error: errors.RequestError) -> RpcStatus:
    """Code, message and trailers for an error."""
    code = STATUS_OF[type(error)]
    message = _short(str(error), MAX_MESSAGE_CHARACTERS)
    rich = status_pb2.Status(code=_number(code), message=message)
    rich.details.append(_packed(_error_info(error)))
    trailers: list[tuple[str, str | bytes]] = []
    if isinstance(error, errors.InvalidRequest):
        rich.details.append(_packed(_bad_request(error)))
    if isinstance(error, RETRIED_LATER):
        rich.details.append(_packed(_retry_info(error.retry_after_seconds)))
        trailers.append((PUSHBACK_KEY, str(round(error.retry_after_seconds * 1000))))
    trailers.append((DETAILS_KEY, rich.SerializeToString()))
    return RpcStatus(code, message, tuple(trailers))


def internal_status() -> RpcStatus:
    """What a client learns of a bug: that there is one. The log holds the rest."""
    return RpcStatus(StatusCode.INTERNAL, "the server failed on this call; its log says why", ())


async def abort(context: Context, status: RpcStatus) -> NoReturn:
    """End the call. Does not return: gRPC raises through the handler."""
    await context.abort(status.code, status.message, status.trailers)
    raise AssertionError("context.abort returned")


def reason_of(error: errors.RequestError) -> str:
    """The class's name as gRPC writes reasons: ``QueueFull`` is ``QUEUE_FULL``."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", type(error).__name__).upper()


def code_number(error: errors.RequestError) -> int:
    """The status code as a number, for statuses that travel inside messages."""
    return _number(STATUS_OF[type(error)])


def _error_info(error: errors.RequestError) -> error_details_pb2.ErrorInfo:
    info = error_details_pb2.ErrorInfo(reason=reason_of(error), domain=DOMAIN)
    if isinstance(error, errors.QueueFull):
        info.metadata["limit"] = error.reason
    return info


def _bad_request(error: errors.InvalidRequest) -> error_details_pb2.BadRequest:
    bad = error_details_pb2.BadRequest()
    for violation in error.violations[:MAX_VIOLATIONS]:
        bad.field_violations.add(field=_short(violation.field, 80), description=_short(violation.rule, 200))
    return bad


def _retry_info(seconds: float) -> error_details_pb2.RetryInfo:
    delay = duration_pb2.Duration()
    delay.FromMilliseconds(round(seconds * 1000))
    return error_details_pb2.RetryInfo(retry_delay=delay)


def _packed(detail: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed


def _number(code: StatusCode) -> int:
    number: int = code.value[0]
    return number


def _short(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
