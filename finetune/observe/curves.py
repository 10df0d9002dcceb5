"""Curves as SVG text: small, sharp at any size, and nothing to load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Final

_WIDTH, _HEIGHT = 520, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 30, 34
_MOST_POINTS: Final = 1200
"""Of one line; more would not be seen."""

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One line of a picture."""

    name: str
    points: Points
    color: str
    dots: bool = False
    """Whether each point is marked: for few points."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """Curves over the steps, with one axis of values."""

    title: str
    curves: Sequence[Curve]
    marks: Sequence[float] = field(default=())
    """Steps that get a vertical line."""

    def as_svg(self) -> str:
        """The picture; empty if no curve has a finite point."""
        curves = [(curve, _thinned(_finite(curve.points))) for curve in self.curves]
        every = [point for _, points in curves for point in points]
        if not every:
            return ""
        across = _Axis([x for x, _ in every], _LEFT, _WIDTH - _RIGHT)
        up = _Axis([y for _, y in every], _HEIGHT - _BOTTOM, _TOP)
        parts = [
            f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(self.title)}" '
            'xmlns="http://www.w3.org/2000/svg">',
            f'<text x="{_LEFT}" y="16" class="title">{escape(self.title)}</text>',
            *_grid(across, up),
        ]
        for step in self.marks:
            x = f"{across.at(step):.1f}"
            parts.append(f'<line x1="{x}" x2="{x}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}" class="mark"/>')
        for curve, points in curves:
            placed = [(across.at(x), up.at(y)) for x, y in points]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{curve.color}" stroke-width="1.6"/>')
            if curve.dots or len(placed) == 1:
                parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{curve.color}"/>' for x, y in placed]
        if len(self.curves) > 1:
            parts += _legend([curve for curve, points in curves if points])
        return "\n".join([*parts, "</svg>"])


class _Axis:
    """From values to places in the picture; its ticks are round numbers."""

    def __init__(self, values: Sequence[float], begin: float, end: float) -> None:
        low, high = min(values), max(values)
        if high - low < 1e-12 * max(abs(high), 1e-300):
            low, high = (low - 1.0, high + 1.0) if low == 0 else (low - 0.1 * abs(low), high + 0.1 * abs(high))
        self._low, self._high, self._begin, self._end = low, high, begin, end

    def at(self, value: float) -> float:
        return self._begin + (value - self._low) / (self._high - self._low) * (self._end - self._begin)

    def ticks(self, most: int) -> list[float]:
        rough = (self._high - self._low) / most
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * part for part in (1, 2, 5, 10) if power * part >= rough)
        first = math.ceil(self._low / step - 1e-9)
        last = math.floor(self._high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]


def _grid(across: _Axis, up: _Axis) -> list[str]:
    parts = []
    for value in up.ticks(5):
        y = up.at(value)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_short(value)}</text>')
    for value in across.ticks(6):
        parts.append(f'<text x="{across.at(value):.1f}" y="{_HEIGHT - 16}" text-anchor="middle">{_short(value)}</text>')
    parts.append(f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 3}" text-anchor="end">step</text>')
    return parts


def _legend(curves: Sequence[Curve]) -> list[str]:
    parts, x = [], _WIDTH - _RIGHT
    for curve in reversed(curves):
        parts.append(f'<text x="{x}" y="16" text-anchor="end" fill="{curve.color}">{escape(curve.name)}</text>')
        x -= 8 * len(curve.name) + 14
    return parts


def _short(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-3:
        return f"{value:.2g}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:,.6g}"


def _finite(points: Points) -> list[tuple[float, float]]:
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of every so many points the lowest and the highest: no peak is lost."""
    if len(points) <= _MOST_POINTS:
        return points
    group = math.ceil(2 * len(points) / _MOST_POINTS)
    kept = []
    for first in range(0, len(points), group):
        part = points[first : first + group]
        kept += sorted({min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])})
    return kept
