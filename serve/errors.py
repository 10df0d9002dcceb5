"""Every error the server tells anyone about.

ServeError
├── RequestError                what a caller did or met; mapped to a gRPC status in serve/rpc/status.py
│   ├── InvalidRequest          a field breaks a rule; names field and rule            INVALID_ARGUMENT
│   ├── NotFound                no such model or request                               NOT_FOUND
│   ├── DuplicateRequest        a live request has this id                             ALREADY_EXISTS
│   ├── QueueFull               queue limits reached; retry later                      RESOURCE_EXHAUSTED
│   │   ├── PutOut              it waited, and left for another tenant's               RESOURCE_EXHAUSTED
│   │   └── TenantLimited       the caller's own limits are reached; retry later        RESOURCE_EXHAUSTED
│   ├── SlowReader              the client did not read its stream in time             RESOURCE_EXHAUSTED
│   ├── DeadlineExpired         the call's deadline passed, queued or running          DEADLINE_EXCEEDED
│   ├── RequestAborted          cancelled by the client or by Admin.Abort              CANCELLED
│   ├── FeatureOff              this model or server cannot do it (no chat template)   FAILED_PRECONDITION
│   ├── ReloadRefused           the folder holds nothing that can be served            FAILED_PRECONDITION
│   ├── ProfileRefused          steps cannot be recorded now                           FAILED_PRECONDITION
│   ├── NotAuthenticated        missing or wrong token                                 UNAUTHENTICATED
│   ├── NotPermitted            the token lacks the scope of the method                PERMISSION_DENIED
│   ├── Unavailable             loading, draining or engine down; retry                UNAVAILABLE
│   │   ├── Loading
│   │   ├── Draining
│   │   └── EngineDown
│   └── RequestBroke            this request alone failed inside the engine            INTERNAL
│       └── NotFinite           the model's numbers for it are NaN or infinite         INTERNAL
└── StartError                  the server cannot start; exit code in ``exit_code``
    ├── ConfigError             bad option, file or model: exit 2
    └── RankStartError          a rank failed to load: exit 1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class ServeError(Exception):
    """Root of the tree. The message is written for the person who reads it and never holds prompts or paths of the host."""


class RequestError(ServeError):
    """A request cannot go on."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule of one field, as google.rpc.BadRequest wants it."""

    field: str
    """Dotted path in the request message, for example ``sampling.top_p``."""
    rule: str
    """A sentence that states the value and the rule."""


class InvalidRequest(RequestError):
    """One or more fields break their rules; retrying cannot help."""

    def __init__(self, violations: Sequence[Violation]) -> None:
        assert violations, "an InvalidRequest must say what is wrong"
        self.violations = tuple(violations)
        super().__init__("; ".join(f"{v.field}: {v.rule}" for v in self.violations))

    @classmethod
    def of(cls, field: str, rule: str) -> InvalidRequest:
        return cls([Violation(field, rule)])


class NotFound(RequestError):
    """There is no such model or request."""


class DuplicateRequest(RequestError):
    """A request with this id is still alive."""


class QueueFull(RequestError):
    """The queue is at its limit."""

    def __init__(self, message: str, *, reason: str, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.reason = reason
        """``requests``, ``tokens`` or ``bytes``: the limit that was met; a label value of ``tessera_rejections_total``."""
        self.retry_after_seconds = retry_after_seconds


class PutOut(QueueFull):
    """The request waited in a full queue, and left for one of another tenant that had less than its part of it."""


class TenantLimited(QueueFull):
    """The caller has taken what its tokens allow; ``reason`` is the name of the limit."""


class SlowReader(RequestError):
    """The client let its stream's buffer stay full."""


class DeadlineExpired(RequestError):
    """The call's deadline passed."""


class RequestAborted(RequestError):
    """Cancelled: by the client, by a lost connection, or by Admin.Abort."""


class FeatureOff(RequestError):
    """The loaded model or the server's options do not provide this."""


class ReloadRefused(RequestError):
    """The model was not loaded again; the one before is served. For operators alone: the message may name files."""


class ProfileRefused(RequestError):
    """Steps are not recorded: another recording goes on, or the ranks cannot."""


class NotAuthenticated(RequestError):
    """The call carries no valid token."""


class NotPermitted(RequestError):
    """The token does not allow this call."""


class Unavailable(RequestError):
    """Not now; the same request may work in a moment."""


class Loading(Unavailable):
    """The model is not loaded yet."""


class Draining(Unavailable):
    """The server is going away."""

    retry_after_seconds = 1.0
    """Time for a balancer to look elsewhere, or for the next server to come."""


class EngineDown(Unavailable):
    """A rank died or froze; the supervisor is bringing the engine back."""


class RequestBroke(RequestError):
    """This request failed inside the engine; others are not affected."""


class NotFinite(RequestBroke):
    """The model's numbers for this request are NaN or infinite: trying again cannot help, another model or data type may."""


class StartError(ServeError):
    """The server cannot start."""

    exit_code = 1


class ConfigError(StartError):
    """An option, a configuration file or the model folder is at fault."""

    exit_code = 2


class RankStartError(StartError):
    """A rank failed before it was ready."""
