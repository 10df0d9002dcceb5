"""Which tracer the options ask for."""

from __future__ import annotations

from serve.config import ServerConfig
from serve.errors import ConfigError
from serve.tracing.seam import NoTracing, Tracing


def open_tracing(config: ServerConfig, version: str) -> Tracing:
    """What traces calls, where that is asked for: OpenTelemetry is not imported otherwise.

    Raises:
        ConfigError: it is asked for and not installed.
    """
    if not config.tracing.otlp_endpoint:
        return NoTracing()
    try:
        from serve.tracing.otel import open_otel

        return open_otel(config.tracing, version=version, model=config.model.served_name)
    except ImportError as error:
        raise ConfigError(
            f"tracing.otlp_endpoint is set, and {error.name or 'opentelemetry'} is not installed: pip install 'tessera[otel]'"
        ) from error
