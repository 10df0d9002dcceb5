"""Decoding on a CUDA device, by shape, batch and context, beside transformers: ``make bench-gpu``.

Models are GPT-NeoX's of Pythia-160M's and Pythia-6.9B's shape with random weights, made in ``--work`` and loaded as any
checkpoint is. A cell is one batch size and one context: all sequences are computed up to that context, then ``--steps`` steps
decode one token of each, planned as the engine plans them: launched piece by piece (``eager``), replayed as CUDA graphs
(``graphs``), and replayed as the server does it, each step launched before the one before it has told its tokens (``ahead``).
There are four parts, in this order:

* ``decoding``: the median of a step's seconds, from its launch to its tokens, or from one's tokens to the next one's where they
  are launched ahead; the tokens of all sequences a second; and the share of the memory's limit: the bytes that a step must
  read (all weights but the embedding, and the keys and values of all sequences) by the device's nominal bandwidth, over the
  step's seconds.
* ``peers``: of the cells that were measured, tokens a second of transformers' ``generate`` on the same prompts, and of its
  continuous batching, as it is by default and in CUDA graphs, which it leaves off by itself where flash-attn is not installed.
  The bar is held to the faster of the two, and the head of the record says by which attention it computed.
* ``smaller``: some cells of the larger shape with weights of fp8, int8 and int4, and with keys and values of fp8.
* ``waiting``: the share of a step in which the device waits for the host: what is left of the step's seconds without those in
  which the device computes or copies anything, or is between two operations that it has both been given, by torch's profiler.
  It comes last, since what the profiler attaches to the process stays there.

How long capturing took, and what memory the graphs hold, is recorded once for each model. At the end the record says which of
the bars (``BARS``) were met.

The record is written anew after each cell. Nothing begins after ``--minutes``, each part having a share of them, and what runs
a minute later is ended: all that was not run is recorded as that, and what a system cannot do, or has no memory for, as failed.
``--rehearse`` does all of it with tiny shapes on the CPU, where recorded operations stand in for graphs and torch's operations
for the device's: there a share of a limit means nothing and is left out, and that of waiting means nothing either.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from transformers import AutoConfig

from benchmarks.gpu_decoding import (
    BLOCK_TOKENS,
    PROFILED,
    WARMING,
    WAYS,
    Decoding,
    Ways,
    bytes_of_step,
    nominal_bandwidth,
    prompts,
    timed_steps,
    waits_of,
)  # fmt: skip
from benchmarks.gpu_machine import versions
from benchmarks.gpu_peers import attention_of, by_transformers, read_peer
from benchmarks.gpu_record import Record, result_file, why
from benchmarks.pretrained import Generates
from finetune.model.pretrained import new_model
from serve.options import build_config
from serve.worker.loader import RankModel, Stopwatch, load_rank
from serve.worker.parallel import Ranks
from serve.worker.runner import Runner

SHARES: Final = {"decoding": 0.6, "peers": 0.8, "smaller": 0.9, "waiting": 1.0}
"""Of the time, when nothing of a part begins any more."""
PARTS: Final = tuple(SHARES)
LAST_SECONDS: Final = 60.0
"""What began in time has so long after the end."""
MOST_LOADS: Final = 3
"""Of a peer's model, which is loaded anew after a cell that failed: one that always fails takes no more of the time."""
NOT_RUN: Final = "the time was over"

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Model:
    """One model, as it is served, and its cells."""

    name: str
    sizes: dict[str, int]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    options: dict[str, str] = field(default_factory=dict)

    @property
    def cells(self) -> list[tuple[int, int]]:
        """Batch and context of each."""
        return [(batch, context) for context in self.contexts for batch in self.batches]


@dataclass(frozen=True, slots=True)
class Programme:
    """What is run."""

    models: tuple[Model, ...]
    smaller: tuple[Model, ...]
    device: str
    dtype: str


def shape(layers: int, hidden: int, heads: int, vocabulary: int, positions: int) -> dict[str, int]:
    return {
        "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "intermediate_size": 4 * hidden,
        "vocab_size": vocabulary, "max_position_embeddings": positions,
    }  # fmt: skip


def _smaller(model: Model, *kinds: str) -> Iterator[Model]:
    """The same model with smaller weights or a smaller cache."""
    for kind in kinds:
        option = {"cache.kv_cache_dtype": "fp8"} if kind == "fp8 cache" else {"model.quantization": kind}
        yield replace(model, name=f"{model.name}, {kind}", options=option)


LARGE: Final = shape(32, 4096, 32, 50432, 4096)
TINY: Final = shape(2, 64, 2, 256, 128)
REAL: Final = Programme(
    tuple(
        Model(name, sizes, (1, 8, 64, 256), (128, 512, 2048))
        for name, sizes in (("160M", shape(12, 768, 12, 50304, 4096)), ("6.9B", LARGE))
    ),
    tuple(_smaller(Model("6.9B", LARGE, (1, 64), (512,)), "fp8", "int8", "int4", "fp8 cache")), "cuda", "bfloat16",
)  # fmt: skip
REHEARSAL: Final = Programme(
    (Model("tiny", TINY, (1, 3), (8, 40)),), tuple(_smaller(Model("tiny", TINY, (1,), (8,)), "int8")), "cpu", "bfloat16"
)


def make_model(folder: Path, sizes: dict[str, int], device: str, dtype: str) -> None:
    """A checkpoint with random weights, made on the device."""
    if (folder / "config.json").exists():
        return
    torch.manual_seed(0)
    with torch.device(device):
        model = new_model(AutoConfig.for_model("gpt_neox", **sizes, rotary_pct=0.25), getattr(torch, dtype))
    model.save_pretrained(folder)


def loaded(folder: Path, programme: Programme, model: Model) -> tuple[RankModel, Runner, Row]:
    """The one rank of a server, in this process; and what capturing its steps took."""
    given = {
        "model.path": str(folder), "model.dtype": programme.dtype, "model.device": programme.device,
        "model.verify": "structure", "cache.block_tokens": BLOCK_TOKENS, "scheduler.max_num_seqs": max(model.batches),
        "kernels.cuda_graphs": "on", **model.options,
    }  # fmt: skip
    config = build_config(None, {key: (value, "the benchmark") for key, value in given.items()})
    torch.set_grad_enabled(False)
    rank, ranks = load_rank(config, 0, torch.device(programme.device), lambda: Ranks(0, 1), Stopwatch())
    runner = Runner(rank, ranks)
    assert runner.graphs is not None
    before = torch.cuda.memory_reserved() if programme.device == "cuda" else 0
    began = time.perf_counter()
    runner.graphs.capture()
    taken: Row = {"sizes": len(runner.graphs.sizes), "seconds": time.perf_counter() - began}
    if programme.device == "cuda":
        taken["bytes"] = torch.cuda.memory_reserved() - before
    return rank, runner, taken


class Cells:
    """The cells of one model, measured one after the other by the same loaded rank."""

    def __init__(self, folder: Path, programme: Programme, model: Model) -> None:
        """
        Raises:
            StartError: the device has no room for it, or cannot compute it.
            torch.OutOfMemoryError: likewise.
        """
        self._device, self._model = programme.device, model
        self._itemsize = getattr(torch, programme.dtype).itemsize
        self._bandwidth = nominal_bandwidth(programme.device)
        self._rank, self._runner, self.captured = loaded(folder, programme, model)

    def lacks(self, batch: int, context: int, steps: int) -> str:
        """Why a cell has no room, or nothing."""
        needed = batch * -(-(context + len(WAYS) * (WARMING + steps + PROFILED)) // BLOCK_TOKENS)
        there = self._rank.facts.num_blocks
        return f"it takes {needed} blocks, and the cache holds {there}" if needed > there else ""

    def decode(self, batch: int, context: int, steps: int) -> Row:
        """Seconds, tokens a second and the share of the memory's limit, in each way; or why there is no room."""
        if lack := self.lacks(batch, context, steps):
            return {"not_run": lack}
        row: Row = {}
        for way, step, decoding in self._ways(batch, context):
            seconds = timed_steps(step, steps)
            row[way] = {"seconds": seconds, "tokens_per_second": batch / seconds}
            # Of smaller weights and caches the bytes are others.
            if self._bandwidth is not None and not self._model.options:
                length = decoding.length - steps // 2  # of the step in the middle
                needed = bytes_of_step(self._rank, self._model.sizes, batch, length, self._itemsize)
                row[way]["share_of_memory_limit"] = needed / self._bandwidth / seconds
        return row

    def wait(self, batch: int, context: int) -> Iterator[tuple[str, Row]]:
        """The share of waiting in each way."""
        for way, step, _ in self._ways(batch, context):
            yield way, waits_of(step, PROFILED, self._device)

    def _ways(self, batch: int, context: int) -> Iterator[tuple[str, Callable[[], None], Decoding]]:
        decoding = Decoding(self._runner, batch, context, self._model.sizes["vocab_size"])
        decoding.start()
        ways = Ways(self._runner, decoding)
        for way in WAYS:
            yield way, ways.step(way), decoding
        ways.end()


class Benchmark:
    """The parts of a programme, each of which leaves the device free for the next."""

    def __init__(self, programme: Programme, work: Path, record: Record, steps: int, until: dict[str, float]) -> None:
        """``until``: of each part, the monotonic time after which nothing of it begins."""
        self._programme, self._work, self._record, self._steps, self._until = programme, work, record, steps, until

    def run(self, parts: tuple[str, ...]) -> None:
        """Measure those parts, in their order."""
        acts = {"decoding": self._decode, "peers": self._beside, "smaller": self._smaller, "waiting": self._wait}
        for part in parts:
            acts[part]()

    def _decode(self) -> None:
        self._measure("decoding", self._programme.models)

    def _smaller(self) -> None:
        self._measure("smaller", self._programme.smaller)

    def _measure(self, part: str, models: tuple[Model, ...]) -> None:
        for model in models:
            cells = None if self._is_over(part) else self._cells(model)
            for batch, context in model.cells:
                cell: Row = {"batch": batch, "context": context}
                if isinstance(cells, Cells) and not self._is_over(part):
                    try:
                        cell |= cells.decode(batch, context, self._steps)
                    except Exception as error:  # what was measured before it is not lost, and it may have left anything behind
                        cells = why(error)
                if isinstance(cells, str):
                    cell["failed"] = cells
                elif "ahead" not in cell and "not_run" not in cell:
                    cell["not_run"] = NOT_RUN
                self._record.add(model.name, cell)
            del cells
            self._give_back()

    def _beside(self) -> None:
        """The larger model first, of which most is claimed."""
        for model in reversed(self._programme.models):
            peer: Generates | None = None
            failures = 0
            for row in self._measured(model):
                if self._is_over("peers"):
                    self._record.put(model.name, row, "transformers", {"not_run": NOT_RUN})
                    continue
                try:
                    peer = peer or read_peer(self._folder(model), self._programme.dtype, self._programme.device)
                except Exception as error:  # as above
                    self._record.put(model.name, row, "transformers", {"failed": why(error)})
                    continue
                asked = prompts(row["batch"], row["context"], model.sizes["vocab_size"])
                told = by_transformers(peer, asked, self._steps, self._programme.device)
                self._record.put(model.name, row, "transformers", told)
                failures += "failed" in str(told)
                if "failed" in str(told) and failures < MOST_LOADS:  # what it changed of the model for it may have stayed
                    peer = None
                self._give_back()
            del peer
            self._give_back()

    def _wait(self) -> None:
        for model in self._programme.models:
            rows = self._measured(model)
            cells = None if not rows or self._is_over("waiting") else self._cells(model)
            for row in rows:
                told: Row = {"not_run": NOT_RUN}
                if isinstance(cells, Cells) and not self._is_over("waiting"):
                    try:
                        told = dict(cells.wait(row["batch"], row["context"]))
                    except Exception as error:  # as above
                        cells = why(error)
                self._record.put(model.name, row, "waiting", {"failed": cells} if isinstance(cells, str) else told)
            del cells
            self._give_back()

    def _cells(self, model: Model) -> Cells | str:
        """What measures a model's cells, or why nothing can."""
        folder = self._folder(model)
        try:
            make_model(folder, model.sizes, self._programme.device, self._programme.dtype)
            self._give_back()
            cells = Cells(folder, self._programme, model)
        except Exception as error:  # kernels are compiled here for the first time; other models may do
            return why(error)
        self._record.captured(model.name, cells.captured)
        return cells

    def _folder(self, model: Model) -> Path:
        return self._work / model.name.partition(",")[0]

    def _measured(self, model: Model) -> list[Row]:
        return [row for row in self._record.rows(model.name) if "graphs" in row]

    def _is_over(self, part: str) -> bool:
        return time.monotonic() > self._until[part]

    def _give_back(self) -> None:
        """What nothing holds any more, to the device."""
        gc.collect()
        if self._programme.device == "cuda":
            with suppress(RuntimeError):  # of a device that broke, which whatever comes next is told, too
                torch.cuda.empty_cache()


def main() -> int:
    """``python -m benchmarks.gpu``; 1 where a model or a cell failed."""
    began = time.monotonic()
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes on the CPU: whether it works, not how fast")
    parser.add_argument("--shapes", nargs="+", choices=[model.name for model in REAL.models], help="all")
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="all; peers and waiting are of what was decoded")
    parser.add_argument("--steps", type=int, default=32, help="timed steps of a cell (32)")
    parser.add_argument("--minutes", type=float, default=8.5, help="nothing begins later; what runs has one more (8.5)")
    parser.add_argument("--work", type=Path, help="where the models are made and kept; default: a folder that is removed")
    parser.add_argument("--out", type=Path, help="result file; default: benchmarks/results/gpu-<date>.json, not of a rehearsal")
    args = parser.parse_args()
    out = result_file(parser, args, "gpu")
    programme = REHEARSAL if args.rehearse else REAL
    if args.shapes:
        kept = tuple(model for model in programme.models if model.name in args.shapes)
        smaller = tuple(model for model in programme.smaller if model.name.partition(",")[0] in args.shapes)
        programme = Programme(kept, smaller, programme.device, programme.dtype)
    head: Row = {
        "what": "decoding by batch and context (benchmarks/gpu.py)", "rehearsal": args.rehearse,
        "hardware": torch.cuda.get_device_name() if programme.device == "cuda" else "CPU",
        "bandwidth": nominal_bandwidth(programme.device), "dtype": programme.dtype, "versions": versions(),
        "attention_of_transformers": attention_of(programme.device),
    }  # fmt: skip
    record = Record(head, out, Console())
    ends = began + 60 * args.minutes
    until = {part: began + 60 * args.minutes * share for part, share in SHARES.items()}
    with tempfile.TemporaryDirectory() as scratch:
        record.end_at(ends + LAST_SECONDS, Path(scratch))
        parts = tuple(part for part in PARTS if not args.parts or part in args.parts)
        Benchmark(programme, args.work or Path(scratch), record, args.steps, until).run(parts)
    record.close()
    return int(any("failed" in row for model in (*programme.models, *programme.smaller) for row in record.rows(model.name)))


if __name__ == "__main__":
    sys.exit(main())
