"""The benchmark of tiles: which it tries, what it makes of what it measures, and all of it rehearsed on the CPU."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, cast

import pytest
import torch
from rich.console import Console

from benchmarks import gpu_tile_cells, gpu_tiles
from benchmarks.gpu_tile_cells import Launch, Where
from serve.model.cuda import backend, linear

ROOT: Final = Path(__file__).resolve().parents[2]
HERE: Final = Where("cpu", 8, 0)


class Cell:
    """Computes the same for every tile, but for one of eight warps; of sixteen it cannot be compiled."""

    name, copies = "1 x 8", 1

    def __init__(self) -> None:
        self.warps: list[int] = []

    @contextmanager
    def shaped(self, tile: Mapping[str, int]) -> Iterator[Launch]:
        self.warps.append(tile["num_warps"])
        if tile["num_warps"] == 16:
            raise RuntimeError("out of resource: shared memory")
        yield lambda _: torch.full((3,), 2.0 if tile["num_warps"] == 8 else 1.0)


class Kind:
    """Four warps are in use."""

    name: str = "a kernel"

    def __init__(self, *warps: int) -> None:
        self.axes, self.cell = {"num_warps": warps}, Cell()

    def in_use(self, processors: int) -> Mapping[str, int]:
        return {"num_warps": 4}

    def cells(self, where: Where) -> list[Cell]:
        return [self.cell]


def swept(tmp_path: Path, kind: Kind, minutes: float = 1.0) -> dict[str, Any]:
    """The record."""
    record = gpu_tiles.Tiles({}, tmp_path / "tiles.json", Console(file=io.StringIO()))
    gpu_tiles.Sweep(record, HERE, time.monotonic() + 60 * minutes).run([kind])
    record.close()
    told: dict[str, Any] = json.loads((tmp_path / "tiles.json").read_text())
    return told


def test_tiles_differ_from_the_one_in_use_in_one_number_or_in_two_of_what_is_compiled() -> None:
    in_use = {"positions": 32, "num_warps": 4, "splits": 8}
    tried = list(gpu_tiles.others(in_use, {"positions": (32, 64), "num_warps": (2, 4, 8), "splits": (8, 16)}))
    changes = [{name: number for name, number in tile.items() if number != in_use[name]} for tile in tried]
    assert changes == [
        {"positions": 64}, {"num_warps": 2}, {"num_warps": 8}, {"splits": 16},
        {"positions": 64, "num_warps": 2}, {"positions": 64, "num_warps": 8},
    ]  # fmt: skip


def test_a_tile_that_computes_something_else_or_does_not_compile_is_recorded_and_the_others_are_tried(tmp_path: Path) -> None:
    kind = Kind(4, 8, 16, 2)
    told = swept(tmp_path, kind)
    assert kind.cell.warps == [4, 8, 16, 2, 4]
    first, wrong, failed, other, again = told["shapes"]["a kernel"]
    assert (first["in_use"], other["in_use"], again["in_use"]) == (True, False, True)
    assert wrong["wrong"] == "1 x 8: its results are 1 from those of the tile in use"
    assert failed["failed"] == "RuntimeError: out of resource: shared memory"
    assert other["cells"]["1 x 8"]["times_as_fast"] == pytest.approx(
        first["cells"]["1 x 8"]["seconds"] / other["cells"]["1 x 8"]["seconds"]
    )
    outcome = told["fastest"]["a kernel"]
    assert (outcome["failed"], outcome["wrong"], outcome["measured"], outcome["changes"]) == (1, 1, 1, {"num_warps": [4, 2]})
    shown = Console(file=io.StringIO(), width=200)
    shown.print(gpu_tiles.table_of(told))
    assert "num_warps 4 to 2" in cast("io.StringIO", shown.file).getvalue()


def test_what_comes_after_the_end_is_recorded_as_not_run(tmp_path: Path) -> None:
    kind = Kind(4, 2)
    told = swept(tmp_path, kind, minutes=-1)
    assert told["shapes"]["a kernel"] == [{"not_run": "the time was over", "not_run_tiles": 1}]
    assert kind.cell.warps == []
    assert told["fastest"]["a kernel"]["told"] == "nothing was measured beside the tile in use"


def test_a_kind_whose_own_tile_fails_is_recorded_and_nothing_is_held_to_it(tmp_path: Path) -> None:
    kind = Kind(16, 2)
    kind.in_use = lambda processors: {"num_warps": 16}  # type: ignore[method-assign]
    told = swept(tmp_path, kind)
    assert told["shapes"]["a kernel"] == [
        {"in_use": True, "failed": "RuntimeError: out of resource: shared memory", "not_run_tiles": 1}
    ]
    assert kind.cell.warps == [16]


@pytest.mark.parametrize(
    ("rate", "again", "faster"),
    [(1.02, 1.0, False), (1.04, 1.0, True), (1.04, 1.05, False), (1.04, 0.95, False), (0.9, 1.0, False)],
)
def test_a_tile_is_faster_where_that_is_more_than_two_measurements_differ(rate: float, again: float, faster: bool) -> None:
    cells = {"1 x 8": {"seconds": 1.0, "times_as_fast": rate}}
    rows: list[dict[str, Any]] = [
        {"tile": {"rows": 16}, "in_use": True, "cells": {"1 x 8": {"seconds": 1.0}}},
        {"tile": {"rows": 64}, "in_use": False, "cells": cells, "times_as_fast": rate / 2},
        {"tile": {"rows": 32}, "in_use": False, "cells": cells, "times_as_fast": rate},
        {"tile": {"rows": 16}, "in_use": True, "cells": {}, "times_as_fast": again},
    ]
    told = gpu_tiles.fastest(rows)
    assert (told["changes"], told["times_as_fast"], told["is_faster"]) == ({"rows": [16, 32]}, rate, faster)
    assert told["by_cell"] == {"1 x 8": rate}


def test_a_tile_is_in_the_place_of_the_chosen_one_while_a_cell_is_launched_and_no_longer() -> None:
    chosen = backend.shape_of, linear.linear_shape
    decoding, prompts, layer, _ = gpu_tiles.rehearsal()
    tile = dict(decoding.in_use(8)) | {"num_warps": 2, "splits": 1}
    with decoding.cells(HERE)[0].shaped(tile):
        asked = {"dtype": torch.bfloat16, "head_dim": 16, "group": 2, "capped": False, "biased": False, "fp8": False}
        assert backend.shape_of(**asked, long=False).num_warps == 2
        assert backend.shape_of(**asked, long=True) == chosen[0](**asked, long=True), "prompts keep theirs"
    with layer.cells(HERE)[0].shaped(dict(layer.in_use(8)) | {"outputs": 128}):
        assert linear.linear_shape(torch.bfloat16, 8, 3).outputs == 128
    assert (backend.shape_of, linear.linear_shape) == chosen
    assert set(prompts.in_use(8)) == {"rows", "positions", "num_warps", "num_stages"}


def test_every_tile_that_is_tried_on_a_device_can_be_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads fit into its rows, shares are whole numbers of positions, and what the server takes is among the values."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    kinds = gpu_tiles.real()
    assert len({kind.name for kind in kinds}) == len(kinds) == 15
    for kind in kinds:
        in_use, tiles = kind.in_use(132), list(gpu_tiles.others(kind.in_use(132), kind.axes))
        assert all(in_use[name] in numbers for name, numbers in kind.axes.items()), kind.name
        assert 30 < len(tiles) == len({tuple(tile.items()) for tile in tiles}) < 90, kind.name
        for tile in tiles if isinstance(kind, gpu_tile_cells.Attention) else ():
            shape = kind.shape(tile)
            assert shape.tokens >= 1
            assert backend.SHARE_POSITIONS % shape.positions == 0


@pytest.mark.slow
def test_the_benchmark_of_tiles_tries_every_tile(tmp_path: Path) -> None:
    out = tmp_path / "tiles.json"
    command = [sys.executable, "-m", "benchmarks.gpu_tiles", "--rehearse", "--out", str(out)]
    ended = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    told = json.loads(out.read_text())
    assert told["compiled"]["ended"] == told["compiled"]["processes"] == 1
    assert told["compiled"]["said"] == [], "nothing failed there"
    assert {name: len(rows) for name, rows in told["shapes"].items()} == {
        "attention of tiny, decoding": 5, "attention of tiny, prompts": 3, "layers in int8, few rows": 5,
        "layers in int4, many rows": 3,
    }  # fmt: skip
    for name, rows in told["shapes"].items():
        assert [row["in_use"] for row in rows] == [True, *[False] * (len(rows) - 2), True]
        assert all(cell["difference"] <= gpu_tiles.FURTHEST for row in rows for cell in row["cells"].values())
        assert told["fastest"][name]["measured"] == len(rows) - 2
