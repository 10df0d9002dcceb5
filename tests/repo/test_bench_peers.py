"""The benchmark beside other engines: what it makes of seconds and tokens, and what becomes of a run when an engine fails."""

from __future__ import annotations

import argparse
import io
import json
import sys
from contextlib import closing
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import benchmarks.engines.__main__ as program
from benchmarks.engines.cells import Cell, chosen
from benchmarks.engines.environments import REQUIREMENTS, Unavailable, run
from benchmarks.engines.figures import agreement, summary, table
from benchmarks.engines.peers import Kitchen, Start
from benchmarks.engines.process import EngineProcess

DECODE = Cell("160m", "bf16", "decode", 8, 64)
PREFILL = Cell("160m", "bf16", "prefill", 8, 512)


def counting(wrong: str = "") -> Start:
    return Start(Path(sys.executable), "tests.support.answering_engine", {"wrong": wrong})


# -- figures


def test_decoding_counts_what_comes_after_the_first_tokens_and_prefill_what_comes_before() -> None:
    assert DECODE.rate(1.0, 3.0) == 8 * 64 / 2.0
    assert PREFILL.rate(2.0, 2.0) == 8 * 512 / 2.0
    assert DECODE.rate(1.0, 1.0) is None, "noise longer than the work"


def test_a_slow_turn_of_all_engines_changes_no_ratio_and_the_best_peer_is_who_leaves_us_least() -> None:
    seconds = {"tessera": (1.0, 2.0), "a": (0.0, 2.0), "b": (0.0, 0.5), "c": (3.0, 2.0)}
    slow = {name: (10 * one, 10 * whole) for name, (one, whole) in seconds.items()}
    told = summary(DECODE, {name: [seconds[name], slow[name], seconds[name]] for name in seconds})
    assert told["tessera / peer"] == {"a": 2.0, "b": 0.5}
    assert (told["best peer"], told["tessera / best peer"]) == ("b", 0.5)
    assert told["tokens_per_second"] == {"tessera": 512.0, "a": 256.0, "b": 1024.0}


def test_what_differs_from_the_reference_is_a_tie_only_where_the_second_choice_was_as_good() -> None:
    said = {"ids": [1, 2, 3], "second": [7, 8, 9], "gaps": [0.5, 1e-5, 0.5]}
    told = agreement([[1, 2, 3], [1, 8, 4], [1, 5, 3], [7, 2, 3]], [said] * 4, exact=True)
    assert told == {"sequences": 4, "the same": 1, "tokens before a difference": [3, 1, 1, 0], "ties": 1, "wrong": 2}


def test_the_table_has_a_dash_where_there_is_no_figure() -> None:
    cells = {"x": summary(DECODE, {"tessera": [(1.0, 2.0)]}), "y": summary(DECODE, {"a": [(1.0, 2.0)]})}
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(table({"cells": cells}, ["tessera", "a"]))
    rows = [line.replace("│", " ").split() for line in console.export_text().splitlines() if "512" in line]
    assert rows == [["x", "512", "–", "–", "–"], ["y", "–", "512", "–", "–"]]


# -- cells


def test_cells_are_chosen_by_pattern_with_those_of_one_shape_and_precision_together() -> None:
    assert [cell.name for cell in chosen(["*/bf16/prefill/*"], quick=False)] == [
        "160m/bf16/prefill/1x1024",
        "160m/bf16/prefill/8x512",
    ]
    for cells in (chosen([], quick=False), chosen([], quick=True), chosen(["*"], quick=False)):
        groups = [key for key, _ in groupby(cells, key=lambda cell: (cell.shape, cell.precision))]
        assert len(groups) == len(set(groups))
    with pytest.raises(ValueError, match="no cell is called 160m/fp16"):
        chosen(["160m/fp16/*"], quick=False)


def test_prompts_are_the_same_in_each_run_and_of_the_lengths_that_the_name_says() -> None:
    assert DECODE.prompts() == Cell("160m", "bf16", "decode", 8, 64).prompts()
    assert [len(prompt) for prompt in PREFILL.prompts()] == [512] * 8


def test_of_prompts_that_come_one_by_one_all_new_tokens_count_and_all_the_time() -> None:
    (cell,) = chosen(["160m/bf16/arrivals/*"], quick=False)
    assert cell.every > 0.0
    assert cell.rate(0.0, 2.0) == 32 * 65 / 2.0
    assert DECODE.every == 0.0


# -- engines


def test_what_a_library_prints_spoils_no_answer(tmp_path: Path) -> None:
    with closing(EngineProcess(counting(), tmp_path / "log")) as engine:
        assert engine.generate([[4], [8]], 3).ids == [[5, 6, 7], [9, 10, 11]]
        assert engine.versions == {"counting": "1"}
    assert (tmp_path / "log").read_text().split("\n")[:2] == ["a library says something", "and says more"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("opens", "ValueError: no such weights"),
        ("ends", "it ended: .*says more"),
        ("short", r"1 answers of \[1\] tokens for 1 of 2"),
    ],
)
def test_an_engine_that_fails_says_why(tmp_path: Path, wrong: str, said: str) -> None:
    with pytest.raises(Unavailable, match=said), closing(EngineProcess(counting(wrong), tmp_path / "log")) as engine:
        engine.generate([[1]], 2)


def test_prompts_come_one_by_one_to_engines_that_take_them_so(tmp_path: Path) -> None:
    with closing(EngineProcess(counting(), tmp_path / "log")) as engine:
        assert engine.generate([[4], [8]], 1, every=0.01).ids == [[5], [9]]
    with closing(EngineProcess(counting("at once"), tmp_path / "log")) as engine:
        assert engine.generate([[4]], 1).ids == [[5]]
        with pytest.raises(Unavailable, match="it takes no prompt while it answers others"):
            engine.generate([[4], [8]], 1, every=0.01)


def test_a_command_that_fails_says_its_last_lines(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"ended with 1: .*ZeroDivisionError"):
        run([sys.executable, "-c", "1 / 0"], tmp_path / "log")


# -- a run


def test_a_run_names_who_failed_keeps_the_others_figures_and_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, started = list[str](), list[Start]()

    def engine(name: str, wrong: str = "") -> Any:
        def start(kitchen: Kitchen, shape: str, precision: str) -> Start:
            asked.append(name)
            if wrong == "missing":
                raise Unavailable("no wheel for this Python")
            started.append(counting(wrong))
            return started[-1]

        return start

    engines = {
        "tessera": engine("tessera"),
        "openvino": engine("openvino", "fails"),
        "llama.cpp": engine("llama.cpp", "missing"),
    }
    monkeypatch.setattr(program, "ENGINES", engines)
    prompts = Cell("160m", "fp32", "decode", program.COMPARED, 64).prompts()
    said = [{"ids": [p[-1] + 1 + k for k in range(64)], "second": [0] * 64, "gaps": [1.0] * 64} for p in prompts]
    monkeypatch.setattr(program, "reference_of", lambda *_: said)
    monkeypatch.setattr(program.time, "sleep", lambda _: None)
    monkeypatch.setattr(program.psutil, "cpu_percent", lambda interval: 0.0)
    out, cell = tmp_path / "record.json", Cell("160m", "int8", "prefill", 1, 1024)

    def go_on(record: dict[str, Any]) -> dict[str, Any]:
        options = argparse.Namespace(cache=tmp_path, turns=2, engines=list(engines), streamed=True)
        taking = program.Run(Kitchen(tmp_path), out, record, options)
        taking.measure([cell], Console(quiet=True))
        return json.loads(out.read_text())

    record = go_on(program.fresh(2, streamed=True))
    assert all(start.settings["streamed"] for start in started)
    told = record["cells"][cell.name]
    assert list(told["tokens_per_second"]) == ["tessera"]
    assert len(told["seconds"]["tessera"]) == 2
    assert record["failed"]["llama.cpp 160m/int8"] == "no wheel for this Python"
    assert "MemoryError: no room" in record["failed"][f"openvino {cell.name}"]
    assert record["agreement"]["160m/int8"]["tessera"]["the same"] == program.COMPARED
    assert "160m/int8/prefill" in out.with_suffix(".svg").read_text()
    asked.clear()
    go_on(record)
    assert asked == [], "what the record has is not measured again"


def test_figures_that_were_had_in_another_way_are_not_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "record.json"
    out.write_text(json.dumps(program.fresh(2, streamed=True)))
    words = ["engines", "--quick", "--continue", "--out", str(out), "--cache", str(tmp_path)]
    monkeypatch.setattr(program.sys, "argv", words)
    with pytest.raises(SystemExit, match=r"its figures are of 'Tessera over gRPC \(token by token\) beside other engines"):
        program.main()


def test_every_requirement_of_the_peers_is_one_version() -> None:
    lines = [line for file in REQUIREMENTS.glob("*.txt") for line in file.read_text().splitlines() if line[0] != "#"]
    assert [line for line in lines if line.count("==") != 1] == []
    assert len(lines) >= 8
