"""How series of Prometheus are shown: under the name of the model that they are about."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector


class NamedRegistry(CollectorRegistry):
    """Another registry as it is shown: every sample bears ``model_name``. What counts pays nothing for it."""

    def __init__(self, registry: Collector, model_name: str) -> None:
        super().__init__()
        self._registry: Any = registry
        self._model_name = model_name

    def collect(self) -> Iterable[Metric]:
        """The other registry's families, made anew for whoever asks."""
        for family in self._registry.collect():
            family.samples = [
                sample._replace(labels={**sample.labels, "model_name": self._model_name}) for sample in family.samples
            ]
            yield family

    def restricted_registry(self, names: Iterable[str]) -> Any:
        """The series of these names alone, of the other registry."""
        return NamedRegistry(self._registry.restricted_registry(names), self._model_name)
