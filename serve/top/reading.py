"""One reading of ``/metrics``, and what happened between two."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPException
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from serve.top.reaching import Place

PREFIX: Final = "tessera_"
MOST_BYTES: Final = 16 * 1024 * 1024
"""An answer of the metrics port is read up to this size: no server has so many series."""
_MOST_SHOWN: Final = 300
"""Bytes of a refusal that are shown."""

Labels = dict[str, str]


class NoReading(Exception):
    """The address does not answer, or not as a server of ours does; the message says which."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Every sample at one moment."""

    at_seconds: float
    """Monotonic clock."""
    samples: dict[str, list[tuple[Labels, float]]]
    """By the series' name, as shown."""

    def each(self, name: str) -> list[tuple[Labels, float]]:
        """The series of a name, with or without the prefix that ours have."""
        return self.samples.get(PREFIX + name) or self.samples.get(name, [])

    def total(self, name: str, **labels: str) -> float | None:
        """The sum of the series of a name that have these labels; ``None`` where there are none."""
        found = [value for own, value in self.each(name) if labels.items() <= own.items()]
        return sum(found) if found else None

    def by(self, name: str, label: str) -> dict[str, float]:
        """Sums by one label's values."""
        sums: dict[str, float] = {}
        for labels, value in self.each(name):
            if label in labels:
                sums[labels[label]] = sums.get(labels[label], 0.0) + value
        return sums

    def named(self, label: str, ending: str) -> Iterator[str]:
        """Names of series that have a label and end so."""
        for name, series in self.samples.items():
            if name.endswith(ending) and any(label in labels for labels, _ in series):
                yield name


@dataclass(frozen=True, slots=True)
class Span:
    """What happened from one reading to a later one."""

    before: Reading
    now: Reading

    @property
    def seconds(self) -> float:
        return self.now.at_seconds - self.before.at_seconds

    def rate(self, name: str, **labels: str) -> float | None:
        """How much a counter grew in a second; a server that was started again began at 0."""
        now, before = self.now.total(name, **labels), self.before.total(name, **labels)
        if now is None or self.seconds <= 0:
            return None
        return _grown(before or 0.0, now) / self.seconds

    def rates(self, name: str, label: str) -> dict[str, float]:
        """How much a counter grew in a second, for each value of a label."""
        if self.seconds <= 0:
            return {}
        before = self.before.by(name, label)
        return {key: _grown(before.get(key, 0.0), now) / self.seconds for key, now in self.now.by(name, label).items()}

    def quantile(self, histogram: str, q: float) -> float | None:
        """Below which of a histogram's values a part of those lie that came meanwhile; ``None`` where none came.

        Values are taken to be spread evenly within a bucket; of the last, which has no end, it is the beginning.
        """
        before = self.before.by(f"{histogram}_bucket", "le")
        counts = sorted(
            (float(bound), _grown(before.get(bound, 0.0), now))
            for bound, now in self.now.by(f"{histogram}_bucket", "le").items()
        )
        if not counts or counts[-1][1] <= 0:
            return None
        wanted, low, below = q * counts[-1][1], 0.0, 0.0
        for bound, count in counts:
            if count >= wanted:
                if math.isinf(bound):
                    return low
                share = 1.0 if count == below else (wanted - below) / (count - below)
                return low + (bound - low) * share
            low, below = bound, count
        return low


def read(place: Place, *, timeout_seconds: float = 5.0) -> Reading:
    """Ask once.

    Raises:
        NoReading: nothing answers there, or it is no ``/metrics`` of a server, or one that does not tell whoever asks.
    """
    try:
        with contextlib.closing(place.connection(timeout_seconds)) as connection:
            connection.request("GET", place.target, headers=place.headers)
            answer = connection.getresponse()
            text = answer.read(MOST_BYTES + 1)
    except (OSError, HTTPException, ValueError) as error:
        raise NoReading(f"{place.url} does not answer: {error}") from error
    if answer.status != HTTPStatus.OK:
        raise NoReading(f"{place.url} answers {answer.status} {answer.reason}: {_line(text)}")
    if len(text) > MOST_BYTES:
        raise NoReading(f"{place.url} answers with more than {MOST_BYTES // 2**20} MiB, which no server's metrics are")
    return parsed(text.decode("utf-8", "replace"), time.monotonic(), place.url)


def _line(text: bytes) -> str:
    """The first line of an answer, as far as a terminal may show it."""
    line = text[:_MOST_SHOWN].decode("utf-8", "replace").partition("\n")[0]
    return "".join(letter for letter in line if letter.isprintable())


def parsed(text: str, at_seconds: float, url: str) -> Reading:
    """The samples of an answer.

    Raises:
        NoReading: they are not of a server.
    """
    samples: dict[str, list[tuple[Labels, float]]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    except ValueError as error:
        raise NoReading(f"{url} answers, but not with metrics") from error
    if f"{PREFIX}engine_up" not in samples:
        raise NoReading(f"{url} answers, but not with those of tessera-serve")
    return Reading(at_seconds, samples)


def _grown(before: float, now: float) -> float:
    return now - before if now >= before else now
