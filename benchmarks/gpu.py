"""Decoding on a CUDA device, by shape, batch and context, beside transformers: ``make bench-gpu``.

Models are GPT-NeoX's of Pythia-160M's and Pythia-6.9B's shape with random weights, made in ``--work`` and loaded as any
checkpoint is. A cell is one batch size and one context: all sequences are computed up to that context, then ``--steps`` steps
decode one token of each, planned as the engine plans them: launched piece by piece (``eager``), replayed as CUDA graphs
(``graphs``), and replayed as the server does it, each step launched before the one before it has told its tokens (``ahead``).
Of a cell are recorded, of each

* the median of a step's seconds, from its launch to its tokens, or from one's tokens to the next one's where they are launched
  ahead; and the tokens of all sequences a second;
* the share of the memory's limit: the bytes that a step must read (all weights but the embedding, and the keys and values of
  all sequences) by the device's nominal bandwidth, over the step's seconds;
* the share of a step in which the device waits for the host: what is left of the step's seconds without those in which the
  device computes or copies anything, by torch's profiler over a few more steps, which are not timed;

and, when all cells of a shape are measured and the server's weights and cache are freed, tokens a second of transformers'
``generate`` on the same prompts, and of its continuous batching. How long capturing took, and what memory the graphs hold, is
recorded once for each shape.

The record is written anew after each cell, and after each that transformers has done; what would begin after ``--minutes`` is
recorded as not run, and what transformers cannot do, as failed. ``--rehearse`` does all of it with tiny shapes on the CPU,
where recorded operations stand in for graphs and torch's operations for the device's: there a share of a limit means nothing
and is left out, and that of waiting means nothing either.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, ContinuousBatchingConfig

from benchmarks.peers import System, TransformersContinuousBatching, TransformersGenerate
from benchmarks.pretrained import Generates, read_model
from finetune.model.pretrained import new_model
from serve.engine.plan import Span, Start, StepPlan, StepResult
from serve.options import build_config
from serve.types import BlockId, SamplingParams, SequenceId
from serve.worker.launched import LaunchedStep
from serve.worker.loader import RankModel, Stopwatch, load_rank
from serve.worker.parallel import Ranks
from serve.worker.runner import Runner

RESULTS: Final = Path(__file__).resolve().parent / "results"
BANDWIDTH: Final = {"A100": 2.04e12, "H100": 3.35e12, "H200": 4.8e12, "B200": 8.0e12, "L40S": 0.864e12, "RTX 4090": 1.01e12}
"""Nominal bytes a second of the device's memory, by a part of its name, from the makers' data sheets."""
BLOCK_TOKENS: Final = 16
CHUNK_TOKENS: Final = 8192
"""Of a prompt's computation, at most so many tokens in one step."""
WARMING: Final = 3
"""Steps of a cell before those that are timed, each way."""
PROFILED: Final = 4
"""Steps of a cell after those that are timed, each way, of which the device's own time is taken."""


@dataclass(frozen=True, slots=True)
class Programme:
    """What is run."""

    shapes: dict[str, dict[str, int]]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    device: str
    dtype: str


def shape(layers: int, hidden: int, heads: int, vocabulary: int, positions: int) -> dict[str, int]:
    return {
        "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "intermediate_size": 4 * hidden,
        "vocab_size": vocabulary, "max_position_embeddings": positions,
    }  # fmt: skip


REAL: Final = Programme(
    {"160M": shape(12, 768, 12, 50304, 4096), "6.9B": shape(32, 4096, 32, 50432, 4096)},
    (1, 8, 64, 256), (128, 512, 2048), "cuda", "bfloat16",
)  # fmt: skip
REHEARSAL: Final = Programme({"tiny": shape(2, 64, 2, 256, 128)}, (1, 3), (8, 40), "cpu", "bfloat16")


def make_model(folder: Path, sizes: dict[str, int], device: str, dtype: str) -> None:
    """A checkpoint with random weights, made on the device."""
    if (folder / "config.json").exists():
        return
    torch.manual_seed(0)
    with torch.device(device):
        model = new_model(AutoConfig.for_model("gpt_neox", **sizes, rotary_pct=0.25), getattr(torch, dtype))
    model.save_pretrained(folder)


def prompts(batch: int, context: int, vocabulary: int) -> list[list[int]]:
    """Those of a cell."""
    source = torch.Generator().manual_seed(batch * context)
    return torch.randint(0, vocabulary, (batch, context), generator=source).tolist()


class Decoding:
    """Sequences that are decoded together, by plans like the engine's."""

    def __init__(self, runner: Runner, batch: int, context: int, vocabulary: int) -> None:
        self._runner, self._batch, self._length, self._step = runner, batch, context, 0
        self._launched: LaunchedStep | None = None
        self._prompts = prompts(batch, context, vocabulary)
        self._blocks = iter(range(1 << 30))
        self._held = [0] * batch

    def start(self) -> None:
        """Compute the prompts."""
        for number, prompt in enumerate(self._prompts):
            begun = Start(
                sequence=SequenceId(number), index=0, token_ids=tuple(prompt), num_prompt_tokens=len(prompt),
                sampling=SamplingParams(),
            )  # fmt: skip
            for first in range(0, len(prompt), CHUNK_TOKENS):
                count = min(CHUNK_TOKENS, len(prompt) - first)
                span = self._span(number, first, count, sample=first + count == len(prompt))
                self._execute((begun,) if first == 0 else (), (span,))

    def step(self) -> None:
        """One more token of each."""
        self._check(self._runner.execute(self._next()))

    def step_ahead(self) -> None:
        """The tokens of the step that was launched last time, once the next one is launched."""
        before, plan = self._launched, self._next()
        assert self._runner.follows(plan)
        self._launched = self._runner.launch(plan, follows=True)
        if before is not None:
            self._check(self._runner.settle(before))

    def settle(self) -> None:
        """Read what was launched last."""
        if self._launched is not None:
            self._check(self._runner.settle(self._launched))
            self._launched = None

    def end(self) -> None:
        """Forget the sequences."""
        self._runner.execute(StepPlan(step=self._step, dropped=tuple(SequenceId(n) for n in range(self._batch))))

    def _span(self, number: int, start: int, count: int, *, sample: bool, continues: bool = False) -> Span:
        needed = -(-(start + count) // BLOCK_TOKENS) - self._held[number]
        self._held[number] += needed
        blocks = tuple(BlockId(next(self._blocks)) for _ in range(needed))
        return Span(
            sequence=SequenceId(number), start=start, count=count, sample=sample, continues=continues, new_blocks=blocks
        )

    def _next(self) -> StepPlan:
        spans = tuple(self._span(number, self._length, 1, sample=True, continues=True) for number in range(self._batch))
        self._length += 1
        self._step += 1
        return StepPlan(step=self._step, spans=spans)

    def _execute(self, starts: tuple[Start, ...], spans: tuple[Span, ...]) -> None:
        self._step += 1
        self._check(self._runner.execute(StepPlan(step=self._step, starts=starts, spans=spans)))

    @staticmethod
    def _check(result: StepResult | None) -> None:
        assert result is not None
        assert not result.faults, result.faults[0].message


def busy_seconds(events: Iterable[FunctionEvent], device: str) -> float:
    """The time in which the device did anything: what it does at once counts once, and labels of spans not at all."""
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type.name.lower() == device and not event.is_user_annotation
    )
    busy, until = 0.0, float("-inf")
    for begin, end in spans:
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    return busy / 1e6


def device_seconds(step: Callable[[], None], device: str) -> float:
    """What a step takes the device itself, however long the host takes to launch it."""
    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    if device == "cuda":
        torch.cuda.synchronize()  # what was launched before is none of it
    with profile(activities=[activity]) as seen:
        for _ in range(PROFILED):
            step()
        if device == "cuda":
            torch.cuda.synchronize()
    return busy_seconds(seen.events() or (), device) / PROFILED


def timed_steps(step: Callable[[], None], steps: int, device: str) -> dict[str, Any]:
    """Seconds of a step, which ends with its tokens on the host, and the share of it in which the device waits."""
    walls = []
    for _ in range(WARMING):
        step()
    for _ in range(steps):
        began = time.perf_counter()
        step()
        walls.append(time.perf_counter() - began)
    wall, busy = statistics.median(walls), device_seconds(step, device)
    waits = max(0.0, 1 - busy / wall) if busy else "not told: the profiler saw nothing on the device"
    return {"seconds": wall, "device_waits": waits}


def bytes_of_step(model: RankModel, sizes: dict[str, int], batch: int, context: int, itemsize: int) -> int:
    """What a step must read: the weights but the embedding, of which it reads rows, and all keys and values."""
    weights = model.filler.num_bytes - sizes["vocab_size"] * sizes["hidden_size"] * itemsize
    return weights + 2 * sizes["num_hidden_layers"] * sizes["hidden_size"] * itemsize * batch * context


def by_transformers(model: Generates, prompts: list[list[int]], steps: int, device: str) -> dict[str, Any]:
    """Tokens a second of ``generate`` and of continuous batching, without the prompts: each is also run for one token."""
    # On a GPU it chooses by what is free, on the CPU by all that there is.
    room = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=256) if device == "cpu" else None
    systems: dict[str, System] = {
        "generate": TransformersGenerate(model),
        "continuous_batching": TransformersContinuousBatching(model, room),
    }
    found: dict[str, Any] = {}
    for name, system in systems.items():
        try:
            seconds = []
            for tokens in (1, 1, 1 + steps):  # the first warms up
                began = time.perf_counter()
                system.generate(prompts, tokens)
                if device == "cuda":
                    torch.cuda.synchronize()
                seconds.append(time.perf_counter() - began)
            more = seconds[2] - seconds[1]
            found[name] = len(prompts) * steps / more if more > 0 else "not told: the longer run took no longer"
        except Exception as error:  # a peer that cannot do a cell is no reason to lose the others
            found[name] = f"failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return found


def loaded(folder: Path, programme: Programme, most_tokens: int) -> tuple[RankModel, Runner, dict[str, Any]]:
    """The one rank of a server, in this process; and what capturing its steps took."""
    given = {
        "model.path": str(folder), "model.dtype": programme.dtype, "model.device": programme.device,
        "model.verify": "structure", "cache.block_tokens": BLOCK_TOKENS, "scheduler.max_num_seqs": max(programme.batches),
        "kernels.cuda_graphs": "on",
    }  # fmt: skip
    config = build_config(None, {key: (value, "the benchmark") for key, value in given.items()})
    torch.set_grad_enabled(False)
    model, ranks = load_rank(config, 0, torch.device(programme.device), lambda: Ranks(0, 1), Stopwatch())
    assert model.facts.num_blocks * BLOCK_TOKENS >= most_tokens // 8, "the cache is too small for the smaller cells"
    runner = Runner(model, ranks)
    assert runner.graphs is not None
    before = torch.cuda.memory_reserved() if programme.device == "cuda" else 0
    began = time.perf_counter()
    runner.graphs.capture()
    taken = {"sizes": len(runner.graphs.sizes), "seconds": time.perf_counter() - began}
    if programme.device == "cuda":
        taken["bytes"] = torch.cuda.memory_reserved() - before
    return model, runner, taken


def ways(runner: Runner, decoding: Decoding, steps: int, device: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """What steps take that are launched piece by piece, replayed ones, and those that are launched ahead."""
    graphs, runner.graphs = runner.graphs, None
    yield "eager", timed_steps(decoding.step, steps, device)
    runner.graphs = graphs
    yield "graphs", timed_steps(decoding.step, steps, device)
    yield "ahead", timed_steps(decoding.step_ahead, steps, device)
    decoding.settle()


def cells(programme: Programme, folder: Path, sizes: dict[str, int], steps: int, ends: float) -> Iterator[dict[str, Any]]:
    """All cells of a shape, as they are measured. What they need of the device is free again after the last."""
    wanted = [(batch, context) for context in programme.contexts for batch in programme.batches]
    model, runner, captured = loaded(folder, programme, max(batch * context for batch, context in wanted))
    yield {"captured": captured}
    itemsize = getattr(torch, programme.dtype).itemsize
    name = torch.cuda.get_device_name() if programme.device == "cuda" else ""
    bandwidth = next((value for part, value in BANDWIDTH.items() if part in name), None)
    for batch, context in wanted:
        cell: dict[str, Any] = {"batch": batch, "context": context}
        if time.monotonic() > ends:
            yield cell | {"not_run": "the time was over"}
            continue
        if batch * (-(-(context + 3 * (WARMING + steps + PROFILED)) // BLOCK_TOKENS)) > model.facts.num_blocks:
            yield cell | {"not_run": f"the cache holds {model.facts.num_blocks} blocks"}
            continue
        decoding = Decoding(runner, batch, context, sizes["vocab_size"])
        decoding.start()
        for way, told in ways(runner, decoding, steps, programme.device):
            cell[way] = told | {"tokens_per_second": batch / told["seconds"]}
            if bandwidth is not None:
                needed = bytes_of_step(model, sizes, batch, context, itemsize) / bandwidth
                cell[way]["share_of_memory_limit"] = needed / told["seconds"]
        decoding.end()
        yield cell


def beside(
    rows: list[dict[str, Any]], programme: Programme, folder: Path, sizes: dict[str, int], steps: int, ends: float
) -> Iterator[dict[str, Any]]:
    """Each cell that was measured, with what transformers does of it put in; or why it does nothing."""
    peer: Generates | None = None
    failed = ""
    for row in rows:
        if "graphs" not in row:
            continue
        if time.monotonic() > ends:
            row["transformers"] = {"not_run": "the time was over"}
            yield row
            continue
        if peer is None and not failed:
            try:
                peer = read_model(folder, programme.dtype, programme.device)
            except torch.OutOfMemoryError as error:
                failed = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if peer is None:
            row["transformers"] = {"failed": failed}
        else:
            asked = prompts(row["batch"], row["context"], sizes["vocab_size"])
            row["transformers"] = by_transformers(peer, asked, steps, programme.device)
            give_back(programme.device)
        yield row


def of_shape(
    rows: list[dict[str, Any]], programme: Programme, folder: Path, sizes: dict[str, int], steps: int, ends: float
) -> Iterator[dict[str, Any]]:
    """Each row of a shape when it is put among the others, and again when it has more: Tessera's first, then the peers'."""
    give_back(programme.device)
    for cell in cells(programme, folder, sizes, steps, ends):
        rows.append(cell)
        yield cell
    give_back(programme.device)
    yield from beside(rows, programme, folder, sizes, steps, ends)


def give_back(device: str) -> None:
    """What nothing holds any more, to the device."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def main() -> int:
    """``python -m benchmarks.gpu``."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes on the CPU: whether it works, not how fast")
    parser.add_argument("--shapes", nargs="+", choices=list(REAL.shapes), help="all")
    parser.add_argument("--steps", type=int, default=32, help="timed steps of a cell (32)")
    parser.add_argument("--minutes", type=float, default=10.0, help="no cell begins later, nor transformers on one (10)")
    parser.add_argument("--work", type=Path, help="where the models are made and kept; default: a folder that is removed")
    parser.add_argument("--out", type=Path, help="result file; default: benchmarks/results/gpu-<date>.json, not of a rehearsal")
    args = parser.parse_args()
    if not args.rehearse and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device here; --rehearse runs it on the CPU")
    programme = REHEARSAL if args.rehearse else REAL
    out = args.out or (None if args.rehearse else RESULTS / f"gpu-{datetime.date.today()}.json")
    ends = time.monotonic() + 60 * args.minutes
    record: dict[str, Any] = {
        "what": "decoding by batch and context (benchmarks/gpu.py)", "rehearsal": args.rehearse,
        "hardware": torch.cuda.get_device_name() if programme.device == "cuda" else "CPU",
        "dtype": programme.dtype, "versions": {"torch": torch.__version__}, "shapes": {},
    }  # fmt: skip
    console = Console()
    with tempfile.TemporaryDirectory() as scratch:
        for name, sizes in programme.shapes.items():
            if args.shapes and name not in args.shapes:
                continue
            folder = (args.work or Path(scratch)) / name
            make_model(folder, sizes, programme.device, programme.dtype)
            rows: list[dict[str, Any]] = record["shapes"].setdefault(name, [])
            for row in of_shape(rows, programme, folder, sizes, args.steps, ends):
                console.print_json(json.dumps({"shape": name} | row))
                if out is not None:
                    out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
