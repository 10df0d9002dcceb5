"""From seconds to what is told: rates, paired ratios, the best peer, and who says the same tokens."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, Final

from rich.table import Table

from benchmarks.engines.cells import Cell
from benchmarks.engines.peers import OURS

TIE: Final = 1e-3
"""Logits that lie no further apart may change places by the order in which fp32 numbers are added up."""

Seconds = tuple[float, float]
"""Of one new token of each prompt, and of all new tokens."""


def summary(cell: Cell, turns: dict[str, list[Seconds]]) -> dict[str, Any]:
    """Rates of every engine, and ours beside each peer's: the median of the ratios of the same turns.

    The best peer is the one beside which ours is lowest. A turn in which noise left no rate counts for nothing.
    """
    rates = {name: [cell.rate(*seconds) for seconds in pairs] for name, pairs in turns.items()}
    medians = {}
    for name, found in rates.items():
        if known := [rate for rate in found if rate is not None]:
            medians[name] = round(statistics.median(known), 1)
    ratios = {}
    for name in medians:
        pairs = [(ours, theirs) for ours, theirs in zip(rates.get(OURS, []), rates[name], strict=False) if ours and theirs]
        if name != OURS and pairs:
            ratios[name] = round(statistics.median(ours / theirs for ours, theirs in pairs), 3)
    told: dict[str, Any] = {"tokens_per_second": medians, "tessera / peer": ratios}
    if ratios:
        best = min(ratios, key=ratios.__getitem__)
        told |= {"best peer": best, "tessera / best peer": ratios[best]}
    told["seconds"] = {name: [[round(part, 4) for part in pair] for pair in pairs] for name, pairs in turns.items()}
    return told


def agreement(ids: list[list[int]], reference: list[dict[str, Any]], exact: bool) -> dict[str, Any]:
    """How far an engine's tokens are transformers' own in fp32, sequence by sequence until the first that differs.

    A first difference is a tie where transformers had the other token second, and no more than ``TIE`` behind. ``wrong`` counts
    the other differences, where the precision should allow none.
    """
    same = ties = wrong = 0
    agreed: list[int] = []
    for mine, theirs in zip(ids, reference, strict=True):
        place = next((place for place, token in enumerate(theirs["ids"]) if mine[place] != token), None)
        agreed.append(len(mine) if place is None else place)
        if place is None:
            same += 1
        elif theirs["gaps"][place] <= TIE and mine[place] == theirs["second"][place]:
            ties += 1
        else:
            wrong += 1
    told: dict[str, Any] = {"sequences": len(ids), "the same": same, "tokens before a difference": agreed}
    return told | ({"ties": ties, "wrong": wrong} if exact else {})


def table(record: dict[str, Any], engines: Sequence[str]) -> Table:
    """Tokens a second by cell and engine, and ours beside the best peer's."""
    drawn = Table("cell", *engines, "best peer", "tessera / best", title="tokens/s")
    for name, cell in record["cells"].items():
        rates = [cell["tokens_per_second"].get(engine) for engine in engines]
        ratio = cell.get("tessera / best peer")
        drawn.add_row(
            name,
            *("–" if rate is None else f"{rate:,.0f}" for rate in rates),
            cell.get("best peer", "–"),
            "–" if ratio is None else f"{ratio:.2f}",
        )
    return drawn
