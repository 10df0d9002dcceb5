"""What a server said on its metrics port over a while, and that while over and over again as promtool's series."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from prometheus_client.parser import text_string_to_metric_families

LABELS: Final = 'job="tessera",instance="127.0.0.1:9400"'
"""What Prometheus adds to each series."""
_COUNTED: Final = ("_total", "_count", "_sum", "_bucket")
_MOMENTS: Final = ("_timestamp_seconds", "start_time_seconds")
"""Ends of names of gauges that hold a time of the clock, and so go on with it."""

Value = Callable[[float, int], float]
"""(what was replayed, which scrape of the hour) -> what is told instead."""


@dataclass
class Record:
    """Scrapes of one server, one every ``every_seconds``."""

    every_seconds: float
    began: float
    """Unix time of the first, where promtool's clock has 0."""
    num_scrapes: int = 0
    series: dict[tuple[str, str], list[float | None]] = field(default_factory=dict)
    """By name and labels; ``None`` before a series was there."""

    def add(self, exposition: str) -> None:
        """Take one scrape in."""
        for family in text_string_to_metric_families(exposition):
            for sample in family.samples:
                if not sample.name.endswith("_created"):
                    self._values(sample.name, sample.labels).append(sample.value)
        self.num_scrapes += 1
        for values in self.series.values():
            values += [values[-1]] * (self.num_scrapes - len(values))

    def _values(self, name: str, labels: Mapping[str, str]) -> list[float | None]:
        key = name, ",".join(f'{label}="{value}"' for label, value in sorted(labels.items()))
        return self.series.setdefault(key, [None] * self.num_scrapes)

    def names(self) -> set[str]:
        """Of all series."""
        return {name for name, _ in self.series}

    def grown(self, name: str, labels: str = "") -> float:
        """By how much counters of a name grew, those whose labels contain ``labels``."""
        found = [values for (known, words), values in self.series.items() if known == name and labels in words]
        return sum((values[-1] or 0.0) - (values[0] or 0.0) for values in found)

    def replayed(self, seconds: float, changed: Mapping[str, Value]) -> list[dict[str, Any]]:
        """So long of it as promtool's series: gauges again and again, counters going on where they were.

        Args:
            changed: other values for the series of a name.
        """
        count = round(seconds / self.every_seconds) + 1
        told = [{"series": f"up{{{LABELS}}}", "values": f"1x{count}"}]
        for (name, labels), values in self.series.items():
            change = changed.get(name)
            numbers = [self._value(name, values, place) for place in range(count)]
            if change is not None:
                numbers = [number if number is None else change(number, place) for place, number in enumerate(numbers)]
            words = " ".join("_" if number is None else repr(number) for number in numbers)
            told.append({"series": f"{name}{{{','.join(filter(None, (LABELS, labels)))}}}", "values": words})
        return told

    def _value(self, name: str, values: list[float | None], place: int) -> float | None:
        rounds, within = divmod(place, self.num_scrapes)
        value = values[within]
        if name.endswith(_MOMENTS):
            return None if value is None else value - self.began if value else value
        if not rounds or not name.endswith(_COUNTED):
            return value
        last, first = values[-1] or 0.0, values[0] or 0.0
        return (first if value is None else value) + rounds * (last - first)


def scraped(url: str) -> str:
    """One answer of a metrics port, as it is."""
    # A proxy in the environment has no business with loopback.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=60) as answer:
        text: str = answer.read().decode()
    return text
