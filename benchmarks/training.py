"""Step time of the training engine beside a bare DeepSpeed loop and HF Trainer; the loss in chunks beside whole logits.

    make bench-training

Every system trains the same seeded GPT-NeoX on the same random batches with the same DeepSpeed settings on two ranks of this
machine. The systems are loaded side by side and take turns of a few steps, so that a slow minute of the machine falls on all of
them; the others wait for their turn without computing. A figure is the median of a system's steps, the first ones left out.
With ``--beside PATH`` the training of another checkout takes turns too.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

RESULTS = Path(__file__).with_name("results")
ROOT = Path(__file__).resolve().parents[1]
SYSTEMS = ("tessera", "deepspeed", "trainer")
BESIDE = "checkout beside"
"""The name of another checkout's ``tessera``."""
VOCABULARY = 16_384
MODEL = {
    "model_type": "gpt_neox", "hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6, "intermediate_size": 1536,
    "vocab_size": VOCABULARY, "max_position_embeddings": 512,
}  # fmt: skip
SEQ, MICRO, ACCUMULATION, RANKS = 256, 2, 2, 2
PAGES = "BENCH_PAGES"
"""Environment variable that names the library by which Tessera's ranks keep the memory of large tensors."""
TURN = 3
"""Steps of a system before it is another one's turn. The first turn warms up and is not counted."""
PATIENCE_SECONDS = 600.0
"""After which a rank that says nothing is ended."""
_WAITING, _FIGURES = "waiting for a turn", "seconds of steps"
LOSS = {"tokens": 2048, "hidden": 768, "vocab": 50_304}


def config(output: str, stage: int, offload: bool) -> Any:
    """The run that all three systems make."""
    from finetune.config import (
        BatchConfig,
        DataConfig,
        ModelConfig,
        OffloadConfig,
        OptimizerConfig,
        RunConfig,
        TokenizerConfig,
        TuneConfig,
        ZeroConfig,
    )

    return TuneConfig(
        run=RunConfig(output=output, ranks=RANKS, device="cpu", precision="fp32"),
        data=DataConfig(train=("unused",), seq_len=SEQ),
        model=ModelConfig(new=MODEL),
        tokenizer=TokenizerConfig(path="unused"),
        batch=BatchConfig(micro=MICRO, accumulation=ACCUMULATION),
        optimizer=OptimizerConfig(lr=1e-4),
        zero=ZeroConfig(stage=stage),  # type: ignore[arg-type]  # a number of the command line
        offload=OffloadConfig(optimizer="cpu" if offload else "none", parameters="cpu" if offload and stage == 3 else "none"),
    )


# -- one rank of one system


class Turns:
    """The seconds of each step of this rank; lets it compute only while it is its system's turn."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """One step: waits for the word from outside first, where a turn begins there."""
        self.begin()
        yield
        self.end()

    def begin(self) -> None:
        if len(self.seconds) % TURN == 0:
            print(f"\n{_WAITING}", flush=True)
            sys.stdin.readline()
        self._began = time.perf_counter()

    def end(self) -> None:
        self.seconds.append(time.perf_counter() - self._began)


def worker(system: str, stage: int, offload: bool, steps: int, adam: str) -> None:
    """Train in turns and print the seconds of every step as JSON."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    if system == "tessera":  # as its ranks are started; an older checkout's worker does as its ranks did
        from finetune.machine.process import LARGE_PAGES, rank_environment

        os.environ[LARGE_PAGES] = rank_environment(1, 1)[LARGE_PAGES]
    import deepspeed
    import torch

    from finetune.engines.zero import engine
    from finetune.machine import build_ops, ops
    from host.process import end_process

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # which would be built, and is for inference
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if adam:
        build_ops.load_op("cpu_adam", Path(adam))
    rank = int(os.environ["RANK"])
    if system == "tessera":
        device = engine.start_ranks("cpu", rank)
        if (library := os.environ.get(PAGES)) is not None:
            build_ops.load_all({ops.PAGES: library}, device="cpu")
    else:  # with the C library's own habits
        device = torch.device("cpu")
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    draw = torch.Generator().manual_seed(rank)
    tokens = torch.randint(0, VOCABULARY, (ACCUMULATION * MICRO * 4, SEQ + 1), generator=draw)
    with tempfile.TemporaryDirectory() as folder:
        run = {"tessera": _tessera, "deepspeed": _deepspeed, "trainer": _trainer}[system]
        turns = Turns()
        run(config(folder, stage, offload), device, tokens, steps, bool(adam), turns)
    print(f"\n{_FIGURES} {json.dumps(turns.seconds)}", flush=True)
    torch.distributed.barrier()
    end_process(0)


def _tessera(config: Any, device: Any, tokens: Any, steps: int, adam: bool, turns: Turns) -> None:
    from finetune.data.batches import Microbatch
    from finetune.engines.zero.engine import ZeroEngine
    from finetune.model.build import initialise, new_config

    hf_config = new_config(MODEL, num_ids=2, seq_len=SEQ, end_of_text_id=0)
    made = ZeroEngine(
        config, hf_config, lambda model, gather: initialise(model, gather, 0), device=device, precision="fp32", cpu_adam=adam
    )
    rows = [Microbatch(part[:, :-1], part[:, 1:].clone()) for part in tokens.split(MICRO)]
    for step in range(steps):
        with turns.step():
            made.train_step([rows[(step * ACCUMULATION + n) % len(rows)] for n in range(ACCUMULATION)], 1e-4)


def _model() -> Any:
    import torch

    from finetune.model.build import new_config
    from finetune.model.pretrained import new_model

    torch.manual_seed(0)
    return new_model(new_config(MODEL, num_ids=2, seq_len=SEQ, end_of_text_id=0))


def _optimizer(config: Any, model: Any, adam: bool) -> Any:
    from finetune.engines.zero.optimizer import choose_optimizer

    return choose_optimizer(config, model, cpu_adam=adam)


def _deepspeed(config: Any, device: Any, tokens: Any, steps: int, adam: bool, turns: Turns) -> None:
    import deepspeed

    from finetune.config import to_deepspeed

    model = _model()
    settings = to_deepspeed(config, device="cpu", precision="fp32", cpu_adam=adam)
    engine, *_ = deepspeed.initialize(model=model, optimizer=_optimizer(config, model, adam), config=settings)
    rows = tokens.split(MICRO)
    for step in range(steps):
        with turns.step():
            for n in range(ACCUMULATION):
                part = rows[(step * ACCUMULATION + n) % len(rows)]
                loss = engine(input_ids=part, labels=part, use_cache=False).loss
                engine.backward(loss)
                engine.step()


def _trainer(config: Any, device: Any, tokens: Any, steps: int, adam: bool, turns: Turns) -> None:
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from finetune.config import to_deepspeed

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            turns.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            turns.end()

    settings = to_deepspeed(config, device="cpu", precision="fp32", cpu_adam=adam)
    arguments = TrainingArguments(
        output_dir=config.run.output, max_steps=steps, per_device_train_batch_size=MICRO,
        gradient_accumulation_steps=ACCUMULATION, use_cpu=True, deepspeed=settings, report_to=[], save_strategy="no",
        logging_strategy="no", disable_tqdm=True, max_grad_norm=config.optimizer.clip, learning_rate=1e-4,
        lr_scheduler_type="constant",
    )  # fmt: skip
    model = _model()
    rows = [
        {"input_ids": row[:SEQ], "labels": row[:SEQ]}
        for row in tokens.repeat(1 + steps * ACCUMULATION * MICRO * RANKS // len(tokens), 1)
    ]
    optimizer = _optimizer(config, model, adam)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, optimizers=(optimizer, schedule), callbacks=[Clock()])
    trainer.train()


# -- the loss alone


def loss_worker(chunked: bool, repeats: int) -> None:
    """Print the median seconds of loss and gradients, and the peak memory they add, in bytes.

    Not counted: the weight's new gradient, which both ways need, and what the libraries take at their first call.
    """
    import torch

    from finetune.model.loss import linear_cross_entropy, token_losses

    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(LOSS["tokens"], LOSS["hidden"], generator=draw).requires_grad_()
    weight = (torch.randn(LOSS["vocab"], LOSS["hidden"], generator=draw) * 0.02).requires_grad_()
    targets = torch.randint(0, LOSS["vocab"], (LOSS["tokens"],), generator=draw)
    weight.grad, hidden.grad = torch.ones_like(weight), torch.ones_like(hidden)
    seconds, added = [], []
    for _ in range(1 + repeats):
        before = _reset_peak()
        began = time.perf_counter()
        if chunked:
            loss = linear_cross_entropy(hidden, weight, None, targets)
        else:
            loss = token_losses(torch.nn.functional.linear(hidden, weight)[None], targets[None])
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        seconds.append(time.perf_counter() - began)
        added.append(_memory("VmHWM") - before - weight.numel() * weight.element_size())
    figures = {"seconds": statistics.median(seconds[1:]), "added": max(added[1:]), "loss": float(loss)}
    print(json.dumps(figures), flush=True)


def _reset_peak() -> int:
    """Have Linux forget this process's peak memory; returns what it has now, in bytes."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


def _memory(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


# -- all of it


def _run(words: list[str], environment: dict[str, str], checkout: Path = ROOT) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.training", *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        cwd=checkout, env={**os.environ, **environment, "PYTHONPATH": str(checkout)},
    )  # fmt: skip


def step_seconds(stage: int, offload: bool, turns: int, adam: str, beside: Path | None = None) -> dict[str, list[float]]:
    """Seconds of every counted step, by system: all systems in one run, a turn at a time."""
    from finetune.machine.inventory import usable_cores
    from finetune.machine.process import LARGE_PAGES, rank_environment

    words = ["--stage", str(stage), "--steps", str((1 + turns) * TURN), "--adam", adam if offload else ""]
    words += ["--offload"] if offload else []
    systems: dict[str, list[subprocess.Popen[str]]] = {}
    started = {system: (system, ROOT) for system in SYSTEMS}
    if beside is not None:
        started[BESIDE] = ("tessera", beside)
    with ExitStack() as stack:
        for system, (worker_of, checkout) in started.items():
            shared = rank_environment(RANKS, max(1, usable_cores() // RANKS))
            del shared[LARGE_PAGES]  # each has it as it is started by itself
            systems[system] = [
                _run(["--worker", worker_of, *words], {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, checkout)
                for rank in range(RANKS)
            ]
            for rank in systems[system]:
                stack.callback(rank.kill)
            for rank in systems[system]:
                _wait_for(_WAITING, rank, system)
        said: dict[str, list[str]] = {}
        for turn in range(1 + turns):
            end = _WAITING if turn < turns else _FIGURES
            for system, ranks in systems.items():
                for rank in ranks:
                    _pipe(rank.stdin).write("go\n")
                    _pipe(rank.stdin).flush()
                said[system] = [_wait_for(end, rank, system) for rank in ranks]
    return {system: json.loads(first.removeprefix(_FIGURES))[TURN:] for system, (first, *_) in said.items()}


def _wait_for(start: str, rank: subprocess.Popen[str], system: str) -> str:
    """The next line of a rank that begins like this; what its libraries print between is passed over."""
    patience = threading.Timer(PATIENCE_SECONDS, rank.kill)
    patience.start()
    try:
        for line in _pipe(rank.stdout):
            if line.startswith(start):
                return line
    finally:
        patience.cancel()
    raise SystemExit(f"{system} ended early; what it said is above")


def _pipe(end: IO[str] | None) -> IO[str]:
    assert end is not None
    return end


def main() -> int:
    """Run the benchmark, print it and record it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="runs of the loss")
    parser.add_argument("--turns", type=int, default=8, help=f"turns of {TURN} steps that each system has")
    parser.add_argument("--beside", type=Path, help="another checkout, whose training takes turns")
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--worker", choices=[*SYSTEMS, "loss-chunked", "loss-whole"], help=argparse.SUPPRESS)
    parser.add_argument("--stage", type=int, default=3, help=argparse.SUPPRESS)
    parser.add_argument("--offload", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--adam", default="", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="result file; default: benchmarks/results/training-cpu-<date>.json")
    options = parser.parse_args()
    if options.worker and options.worker.startswith("loss"):
        loss_worker(options.worker == "loss-chunked", 5)
        return 0
    if options.worker:
        worker(options.worker, options.stage, options.offload, options.steps, options.adam)
        return 0
    from benchmarks.serving import machine
    from finetune.machine import ops

    if ops.ensure(ops.PAGES, print).available:
        os.environ[PAGES] = str(ops.library_of(ops.PAGES))
    built = ops.ensure(ops.CPU_ADAM, print)
    adam = str(ops.library_of(ops.CPU_ADAM)) if built.available else ""
    cases = {"ZeRO-3, all offloaded": (3, True), "ZeRO-2": (2, False)}
    table: dict[str, dict[str, float]] = {}
    for name, (stage, offload) in cases.items():
        runs = step_seconds(stage, offload, options.turns, adam, options.beside and options.beside.resolve())
        medians = {system: statistics.median(values) for system, values in runs.items()}
        table[name] = medians | {f"tessera / {peer}": medians["tessera"] / medians[peer] for peer in list(medians)[1:]}
        print(name, {key: round(value, 4) for key, value in table[name].items()}, flush=True)
    losses: dict[str, list[dict[str, float]]] = {"loss-chunked": [], "loss-whole": []}
    for _ in range(options.repeats):
        for kind, found in losses.items():
            found.append(json.loads(_run(["--worker", kind], {}).communicate(timeout=900)[0].strip().splitlines()[-1]))
    chunked, whole = ({key: statistics.median(r[key] for r in found) for key in found[0]} for found in losses.values())
    logits = LOSS["tokens"] * LOSS["vocab"] * 4
    loss = {
        "chunked": chunked, "whole": whole, "bytes of whole fp32 logits": logits,
        "chunked memory / whole logits": chunked["added"] / logits, "whole memory / whole logits": whole["added"] / logits,
        "speed of chunked / whole": whole["seconds"] / chunked["seconds"],
    }  # fmt: skip
    print(loss)
    today = datetime.date.today().isoformat()
    out = options.out or RESULTS / f"training-cpu-{today}.json"
    record = {
        "what": f"seconds per step, {RANKS} ranks, fp32, {SEQ} tokens x {MICRO} x {ACCUMULATION}; loss and gradients of {LOSS}",
        "date": today, "machine": machine("cpu"), "model": MODEL, "steps": table, "loss": loss,
    }  # fmt: skip
    out.write_text(json.dumps(record, indent=2) + "\n")
    print(f"recorded in {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
