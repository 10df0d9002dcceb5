"""Prometheus series of a run, ``tessera_train_*``: what rank 0 saw, served on the loopback address alone."""

from __future__ import annotations

import math
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, make_wsgi_app

from finetune.errors import ConfigError
from host import endpoint
from host.endpoint import MetricsEndpoint
from host.exposition import NamedRegistry

HOST: Final = "127.0.0.1"
SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0)
_SKIP_CAUSES: Final = ("loss", "gradient", "scale")


class TrainMetrics:
    """Owns the registry and every series in it. May be called from any thread.

    What has not been measured yet, or cannot be here, is ``NaN``: a loss of 0 would be the best of all on a dashboard.
    """

    def __init__(self, *, model_name: str = "") -> None:
        """Make all series.

        Args:
            model_name: of the run, which every series bears where it is shown.
        """
        disable_created_metrics()  # type: ignore[no-untyped-call]  # prometheus_client leaves it unannotated
        self.registry = CollectorRegistry()
        self._shown = NamedRegistry(self.registry, model_name)
        self._loss = self._gauge("loss", "Mean loss of the target tokens of the last step, in nats.")
        self._eval_loss = self._gauge("eval_loss", "Loss on held-out text at the last evaluation, in nats.")
        self._rate = self._gauge("learning_rate", "Learning rate of the last step.")
        self._norm = self._gauge("grad_norm", "Norm of the whole gradient of the last step, before clipping.")
        self._speed = self._gauge(
            "tokens_per_second", "Target tokens a second, all ranks together, over the last log interval."
        )
        self._mfu = self._gauge("model_flops_utilization", "Share of the devices' peak that the model's own operations use.")
        self._step = self._gauge("step", "Steps done.")
        self._steps = self._gauge("steps", "Steps of the schedule.")
        self._memory = self._gauge("memory_bytes", "Memory of rank 0: resident of the host, reserved of the device.", "where")
        self._tokens = self._counter("tokens", "Target tokens trained on by this process's run.")
        self._skipped = self._counter("skipped_steps", "Steps skipped because something was not finite.", "cause")
        self._spikes = self._counter("loss_spikes", "Loss spikes seen.")
        self._saves = self._counter("saves", "Saves made.")
        self._saved_at = self._gauge("last_save_timestamp_seconds", "When the last save ended, or, before one, the run began.")
        self._step_seconds = self._histogram("step_seconds", "Duration of one optimizer step.")
        self._save_seconds = self._histogram("save_seconds", "Duration of one save.")
        for gauge in (self._loss, self._eval_loss, self._norm, self._mfu):
            gauge.set(math.nan)
        for cause in _SKIP_CAUSES:
            self._skipped.labels(cause)

    def _gauge(self, name: str, help_: str, *labels: str) -> Gauge:
        return Gauge(f"tessera_train_{name}", help_, labels, registry=self.registry)

    def _counter(self, name: str, help_: str, *labels: str) -> Counter:
        return Counter(f"tessera_train_{name}", help_, labels, registry=self.registry)

    def _histogram(self, name: str, help_: str) -> Histogram:
        return Histogram(f"tessera_train_{name}", help_, registry=self.registry, buckets=SECONDS)

    def began(self, *, step: int, steps: int) -> None:
        """A run is about to train from ``step`` to ``steps``."""
        self._step.set(step)
        self._steps.set(steps)
        self._saved_at.set_to_current_time()

    def stepped(self, step: int, *, loss: float, rate: float, grad_norm: float, tokens: int, seconds: float) -> None:
        """One step was taken: its loss, learning rate, norm of the gradient, tokens and seconds."""
        for gauge, value in ((self._step, step), (self._loss, loss), (self._rate, rate), (self._norm, grad_norm)):
            gauge.set(value)
        self._tokens.inc(tokens)
        self._step_seconds.observe(seconds)

    def skipped(self, step: int, cause: str) -> None:
        """One step was skipped on all ranks."""
        self._step.set(step)
        self._skipped.labels(cause if cause in _SKIP_CAUSES else "gradient").inc()

    def interval(self, figures: dict[str, Any]) -> None:
        """The figures of a log line."""
        for gauge, key in ((self._speed, "tokens_per_second"), (self._mfu, "mfu")):
            if figures.get(key) is not None:
                gauge.set(figures[key])
        for where, key in (("host", "memory_bytes"), ("device", "device_memory_bytes")):
            if figures.get(key) is not None:
                self._memory.labels(where).set(figures[key])

    def evaluated(self, loss: float) -> None:
        self._eval_loss.set(loss)

    def saved(self, seconds: float) -> None:
        self._saves.inc()
        self._saved_at.set_to_current_time()
        self._save_seconds.observe(seconds)

    def spiked(self) -> None:
        self._spikes.inc()

    def listen(self, port: int) -> MetricsEndpoint:
        """Serve the registry on a thread of its own; port 0 picks a free one.

        Raises:
            ConfigError: the port cannot be bound.
        """
        try:
            return endpoint.listen(make_wsgi_app(self._shown), HOST, port)
        except OSError as error:
            raise ConfigError(
                f"log.metrics_port is {port}; {HOST}:{port} cannot be bound: {error.strerror or error}. Take another, or 0"
            ) from error
