"""Where traces go, and of how many calls."""

from __future__ import annotations

from dataclasses import dataclass

from serve.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class TracingConfig:
    """Traces of calls, for OpenTelemetry. Content is never a part of them."""

    otlp_endpoint: str = ""
    """``http://host:port`` or ``https://…`` of what takes OTLP over gRPC, such as a collector; empty traces nothing. Needs the
    extra ``otel``."""

    trace_ratio: float = 0.01
    """Share of calls that are traced where the caller does not say; one whose ``traceparent`` is sampled always is."""

    def __post_init__(self) -> None:
        if self.otlp_endpoint and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"tracing.otlp_endpoint is {self.otlp_endpoint!r}; it must begin with http:// (plain) or https:// (TLS)"
            )
        if not 0.0 <= self.trace_ratio <= 1.0:
            raise ConfigError(f"tracing.trace_ratio is {self.trace_ratio!r}; it must lie between 0 and 1")
