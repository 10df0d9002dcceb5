"""What is measured of a machine: how fast it computes, and what the steps of a run's engine cost besides."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from finetune.forecast.trials import Prices


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Measured speeds of one rank, while all ranks of the run do the same."""

    products: Mapping[int, float]
    """Size of a square product, forward and backward -> operations a second."""
    attention: Mapping[int, Mapping[int, float]]
    """Size of a head -> keys -> operations a second of the attention kernel, of those that it computes
    (``work.Work.attention``)."""
    plain_bytes: float
    """Bytes a second of additions, copies and the like."""
    costly_bytes: float
    """Bytes a second of activation functions, norms and the like."""
    drawn: float
    """Random numbers a second."""
    call_seconds: float
    """Seconds of one operation on next to nothing."""
    gather_bytes: float | None
    """Bytes of a whole tensor a second that all ranks collect; ``None`` with one rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was measured of a machine, with the ranks and the engine of a run."""

    speeds: Speeds
    prices: Prices

    def lines(self) -> list[str]:
        """What was measured, as lines for the reader."""
        speeds, prices = self.speeds, self.prices
        products = ", ".join(f"{rate / 1e9:,.1f} at {size}" for size, rate in speeds.products.items())
        attention = ", ".join(
            f"{rate / 1e9:,.1f} at {size} x {keys}" for size, each in speeds.attention.items() for keys, rate in each.items()
        )
        between = "" if speeds.gather_bytes is None else f"; between ranks: {speeds.gather_bytes / 1e9:,.2f} GB/s collected"
        return [
            f"products: {products} (10^9 operations a second of one rank, by size)",
            f"attention: {attention} (by the size of a head and the number of keys)",
            f"memory: {speeds.plain_bytes / 1e9:,.1f} GB/s in plain operations, {speeds.costly_bytes / 1e9:,.1f} in activation "
            f"functions and norms; {speeds.drawn / 1e6:,.0f} million random numbers a second",
            f"one call: {speeds.call_seconds * 1e6:,.1f} us{between}",
            f"in steps of small runs: computing takes {prices.computing:.2f} of the sum of its parts; each tensor costs "
            f"{prices.micro_tensor * 1e6:,.0f} us a micro-batch and {prices.step_tensor * 1e6:,.0f} us a step, each million of "
            f"elements {prices.micro_element * 1e9:,.1f} ms and {prices.step_element * 1e9:,.1f} ms",
        ]


def speeds_from(values: Mapping[str, Any]) -> Speeds:
    """From a file or a process.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: it is none.
    """
    attention = {int(size): _rates(each) for size, each in values["attention"].items()}
    if not attention:
        raise ValueError("no attention was measured")
    rest: dict[str, Any] = {}
    for name in (field.name for field in fields(Speeds) if field.name not in ("products", "attention")):
        given = values[name]
        rest[name] = None if name == "gather_bytes" and given is None else _positive(given)
    return Speeds(products=_rates(values["products"]), attention=dict(sorted(attention.items())), **rest)


def _rates(values: Mapping[str, Any]) -> dict[int, float]:
    """Speeds by a size, ascending."""
    rates = {int(size): _positive(rate) for size, rate in values.items()}
    if not rates:
        raise ValueError("nothing was measured")
    return dict(sorted(rates.items()))


def prices_from(values: Mapping[str, Any]) -> Prices:
    """An engine's prices from plain values, as they were kept for a machine."""
    return Prices(**{field.name: _number(values[field.name]) for field in fields(Prices)})


def _number(value: Any) -> float:
    number = float(value)
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{value} is no price")
    return number


def _positive(value: Any) -> float:
    number = _number(value)
    if number == 0:
        raise ValueError(f"{value} is no speed")
    return number
