"""The one exception of the client, made of a gRPC status and its details."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from serve.v1 import inference_pb2

_DETAILS_KEY: Final = "grpc-status-details-bin"
_CODE_NAMES: Final = {code.value[0]: code.name for code in grpc.StatusCode}


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One broken rule of one field of the request."""

    field: str
    """Path of the field, for example ``sampling.top_p``."""
    description: str


class TesseraError(Exception):
    """A call did not end well."""

    def __init__(
        self,
        code: str,
        message: str,
        *,
        violations: Sequence[FieldViolation] = (),
        reason: str = "",
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        """Name of the gRPC status, for example ``INVALID_ARGUMENT``."""
        self.message = message
        self.violations = tuple(violations)
        """For INVALID_ARGUMENT: what is wrong with which field."""
        self.reason = reason
        """The server's word for the error, for example ``QUEUE_FULL``; empty when the error is not the server's."""
        self.retry_after_seconds = retry_after_seconds
        """When a retry is worth it: for RESOURCE_EXHAUSTED by a full queue, and UNAVAILABLE by a server that drains."""


def from_rpc_error(error: Any, address: str) -> TesseraError:
    """The client's error for gRPC's, of either of its two interfaces."""
    code, message = error.code(), error.details() or ""
    violations: list[FieldViolation] = []
    reason, retry_after = "", None
    for detail in _details(error.trailing_metadata()):
        if isinstance(detail, error_details_pb2.ErrorInfo):
            reason = detail.reason
        elif isinstance(detail, error_details_pb2.BadRequest):
            violations += [FieldViolation(v.field, v.description) for v in detail.field_violations]
        elif isinstance(detail, error_details_pb2.RetryInfo):
            retry_after = detail.retry_delay.ToTimedelta().total_seconds()
    if code is grpc.StatusCode.UNAVAILABLE and not reason:
        message = f"no server answers at {address} ({message})"
    return TesseraError(code.name, message, violations=violations, reason=reason, retry_after_seconds=retry_after)


def from_batch_error(error: inference_pb2.Error) -> TesseraError:
    """The client's error for one request of a batch."""
    return TesseraError(
        _CODE_NAMES.get(error.code, "UNKNOWN"),
        error.message,
        violations=[FieldViolation(v.field, v.description) for v in error.violations],
        reason=error.reason,
        retry_after_seconds=error.retry_after_seconds if error.HasField("retry_after_seconds") else None,
    )


def _details(metadata: Iterable[tuple[str, Any]] | None) -> list[Any]:
    kinds = (error_details_pb2.ErrorInfo, error_details_pb2.BadRequest, error_details_pb2.RetryInfo)
    found = []
    for key, value in metadata or ():
        if key != _DETAILS_KEY:
            continue
        try:
            packed = status_pb2.Status.FromString(value).details
        except DecodeError:
            continue  # from something between here and the server; the code and message still stand
        for detail in packed:
            for kind in kinds:
                message = kind()
                if detail.Is(kind.DESCRIPTOR) and detail.Unpack(message):
                    found.append(message)
    return found
