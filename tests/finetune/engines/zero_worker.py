"""One of two ranks that drive the engine directly: ``python -m tests.finetune.engines.zero_worker OUT CPU_ADAM_LIBRARY``.

Starting ranks is what takes time, so one pair of them goes through all cases and writes what it saw to OUT.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import pin_memory as deepspeed_pins
from torch import nn
from transformers import PreTrainedModel

from checkpoint import open_checkpoint
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
from finetune.data.batches import Microbatch
from finetune.engines.protocol import TrainingEngine
from finetune.engines.zero import engine as ds
from finetune.engines.zero.engine import ZeroEngine
from finetune.engines.zero.pinned import pin_exactly
from finetune.errors import RunError
from finetune.machine.build_ops import load_op
from finetune.model.build import build_empty, decay_groups, initialise, new_config
from finetune.model.loss import token_losses
from finetune.train.position import RunPosition
from finetune.train.resume import ResumeState
from finetune.train.saving import CheckpointSaver
from finetune.train.schedule import Schedule
from host.process import end_process
from tests.finetune.engines.reductions import reductions

STEPS = 10
RANKS = 2
ACCUMULATION = 2
SETTINGS = {
    "model_type": "gpt_neox",
    "hidden_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 50,
}
OPTIMIZER = OptimizerConfig(lr=1e-2, weight_decay=0.1, clip=0.5)
SCHEDULE = Schedule(STEPS, 3, OPTIMIZER.lr, 0.1)
CASES = {
    "zero1": (1, "none", "none"),
    "zero1-offload": (1, "cpu", "none"),
    "zero2": (2, "none", "none"),
    "zero2-offload": (2, "cpu", "none"),
    "zero3": (3, "none", "none"),
    "zero3-offload": (3, "cpu", "none"),
    "zero3-offload-all": (3, "cpu", "cpu"),
    "zero3-ratio": (3, "cpu", "none"),
}
HALF = ("zero2-offload", "zero3")
"""Cases that are also trained in fp16."""


def hf_config() -> Any:
    """Odd sizes: nothing divides evenly over the ranks."""
    return new_config({**SETTINGS, "vocab_size": 61}, num_ids=61, seq_len=16, end_of_text_id=0)


def step_data(step: int) -> list[Microbatch]:
    """All micro-batches of one step, every rank's: targets that do not count are spread unevenly."""
    draw = torch.Generator().manual_seed(step % 2)  # two batches again and again: something to learn
    batches = []
    for number in range(RANKS * ACCUMULATION):
        tokens = torch.randint(0, 61, (2, 17), generator=draw)
        targets = tokens[:, 1:].clone()
        targets[:, : 3 * number] = -100
        batches.append(Microbatch(tokens[:, :-1], targets))
    return batches


def mine(batches: list[Microbatch], rank: int) -> list[Microbatch]:
    return batches[rank::RANKS]


@contextmanager
def whole(parameters: list[nn.Parameter]) -> Iterator[bool]:
    yield True


def reference() -> tuple[list[float], dict[str, torch.Tensor]]:
    """Plain PyTorch on the whole batch: losses of every step, and the starting weights."""
    from contextlib import nullcontext

    model = build_empty(hf_config(), torch.float32, nullcontext())
    initialise(model, whole, 5)
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW(decay_groups(model, OPTIMIZER.weight_decay), betas=OPTIMIZER.betas, eps=OPTIMIZER.eps)  # type: ignore[arg-type]
    losses = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = SCHEDULE.rate(step)
        inputs = torch.cat([batch.inputs for batch in step_data(step)])
        targets = torch.cat([batch.targets for batch in step_data(step)])
        loss = token_losses(model(input_ids=inputs, use_cache=False).logits, targets) / (targets != -100).sum()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses, start


def make_engine(
    case: str,
    adam: bool,
    precision: str = "fp32",
    fill: Callable[[PreTrainedModel, Any], None] = lambda model, gather: initialise(model, gather, 5),
) -> ZeroEngine:
    stage, optimizer, parameters = CASES[case]
    config = TuneConfig(
        run=RunConfig(output="unused", ranks=RANKS),
        data=DataConfig(train=("unused",)),
        model=ModelConfig(new=SETTINGS),
        tokenizer=TokenizerConfig(path="unused"),
        batch=BatchConfig(micro=2, accumulation=ACCUMULATION),
        optimizer=OPTIMIZER,
        zero=ZeroConfig(stage=stage),  # type: ignore[arg-type]
        offload=OffloadConfig(optimizer=optimizer, parameters=parameters, ratio=0.5 if case == "zero3-ratio" else 1.0),  # type: ignore[arg-type]
    )
    accelerator = get_accelerator()
    name = accelerator._name
    if case == "zero3-ratio":
        accelerator._name = "cpu:0"  # the same device by another name: DeepSpeed takes it for one that is not the host's
    try:
        made = ZeroEngine(config, hf_config(), fill, device=torch.device("cpu"), precision=precision, cpu_adam=adam)
    finally:
        accelerator._name = name
    if case == "zero3-ratio":
        places = list(made._engine.optimizer.subgroup_to_device.values())
        assert 0 < places.count("cpu:0") < len(places), "both sides have a part"
    return made


class CountingDriver:
    """In the place of CUDA's."""

    def __init__(self) -> None:
        self.held: dict[int, int] = {}
        self.whole_pages = True

    def register(self, address: int, num_bytes: int) -> None:
        assert address not in self.held
        self.held[address] = num_bytes
        self.whole_pages &= address % mmap.PAGESIZE == 0 and num_bytes % mmap.PAGESIZE == 0

    def unregister(self, address: int) -> None:
        del self.held[address]


def pinned(case: str, adam: bool, rank: int, start: dict[str, torch.Tensor]) -> dict[str, Any]:
    """``parity`` with memory that is pinned as for a GPU, and what of it was."""
    driver, write = CountingDriver(), ds.to_deepspeed

    def pinning(*args: Any, **words: Any) -> dict[str, Any]:
        written = write(*args, **words)
        for name in ("offload_optimizer", "offload_param"):
            if name in written["zero_optimization"]:
                written["zero_optimization"][name]["pin_memory"] = True
        return written

    with patch.object(deepspeed_pins, "get_active_native_pinned_memory"), patch.object(ds, "to_deepspeed", pinning):
        found = pin_exactly(driver)
        told = parity(case, adam, rank, start)
    return {**told, "most": found.most_bytes, "whole_pages": driver.whole_pages}


def snapshot(engine: TrainingEngine) -> dict[str, torch.Tensor]:
    """All weights, exact and computing, and moments; on rank 0."""
    tensors = {f"exact.{name}": tensor for name, tensor in engine.weights(torch.float32, from_master=True)}
    tensors |= {f"computing.{name}": tensor for name, tensor in engine.weights(torch.float32)}
    tensors |= dict(engine.optimizer_state())
    return {name: tensor.clone() for name, tensor in tensors.items() if tensor is not None}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def parity(case: str, adam: bool, rank: int, start: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Losses of every step, and whether the starting weights were those of plain PyTorch."""
    engine = make_engine(case, adam)
    begin = {name: tensor.clone() for name, tensor in engine.weights(torch.float32) if tensor is not None}
    losses = [engine.train_step(mine(step_data(step), rank), SCHEDULE.rate(step)).loss for step in range(STEPS)]
    return {"same_start": rank != 0 or same(begin, start), "losses": losses}


@contextmanager
def fp16_on_cpu() -> Iterator[None]:
    """DeepSpeed trains in fp16 only where it is fast. Here it need not be."""
    accelerator = type(get_accelerator())
    supported = accelerator.is_fp16_supported
    accelerator.is_fp16_supported = lambda self: True
    try:
        yield
    finally:
        accelerator.is_fp16_supported = supported


def half(case: str, adam: bool, rank: int) -> dict[str, Any]:
    """fp16: ten good steps, one whose scaled gradients overflow, one whose activations do, one more good step."""
    with fp16_on_cpu():
        engine = make_engine(case, adam, "fp16")
    assert engine.loss_scale is not None
    losses = [engine.train_step(mine(step_data(step), rank), SCHEDULE.rate(step)).loss for step in range(10)]
    good_steps = engine.loss_scale.good_steps
    before, optimizer_steps = snapshot(engine), engine.optimizer_steps
    engine.loss_scale.value = 2.0**60
    overflow = engine.train_step(mine(step_data(10), rank), 1e-3, diagnose=True)
    lowered = engine.loss_scale.value
    engine.loss_scale.value = 2.0**9
    if rank == 1:
        handle = next(engine.model.parameters()).register_hook(lambda gradient: gradient * math.inf)
    small = engine.train_step(mine(step_data(10), rank), 1e-3, diagnose=True)
    if rank == 1:
        handle.remove()
    engine.loss_scale.value = 2.0**16
    block = engine.model.get_submodule("gpt_neox.layers.1.mlp.act")
    handle = block.register_forward_hook(lambda module, args, output: output * (3e5 if rank == 1 else 1.0))
    activations = engine.train_step(mine(step_data(11), rank), 1e-3, diagnose=True)
    handle.remove()
    untouched = same(before, snapshot(engine)) and engine.optimizer_steps == optimizer_steps
    last = engine.train_step(mine(step_data(12), rank), 1e-3)
    return {
        "losses": losses,
        "good_steps": good_steps,
        "skipped": [overflow.skipped, small.skipped, activations.skipped, last.skipped],
        "diagnoses": [overflow.diagnosis, small.diagnosis, activations.diagnosis],
        "scales": [lowered, engine.loss_scale.value],
        "untouched": untouched,
        "norm": last.grad_norm,
    }


def not_finite(engine: ZeroEngine, rank: int) -> dict[str, Any]:
    """A good step, one with a NaN gradient on rank 1 alone, one with a NaN loss there, a good one, one whose norm overflows."""
    seen = [engine.train_step(mine(step_data(0), rank), 1e-3)]
    before, optimizer_steps = snapshot(engine), engine.optimizer_steps
    if rank == 1:
        handle = next(engine.model.parameters()).register_hook(lambda gradient: gradient * math.nan)
    seen.append(engine.train_step(mine(step_data(1), rank), 1e-3, diagnose=True))
    if rank == 1:
        handle.remove()
    computed = engine._loss
    if rank == 1:
        engine._loss = lambda batch: computed(batch) * math.nan  # type: ignore[method-assign]
    seen.append(engine.train_step(mine(step_data(2), rank), 1e-3))
    untouched = same(before, snapshot(engine)) and engine.optimizer_steps == optimizer_steps
    engine._loss = computed  # type: ignore[method-assign]
    seen.append(engine.train_step(mine(step_data(3), rank), 1e-3))
    after = snapshot(engine)
    optimizer_steps = engine.optimizer_steps
    handle = next(engine.model.parameters()).register_hook(lambda gradient: torch.full_like(gradient, 3e19))
    beyond = engine.train_step(mine(step_data(4), rank), 1e-3)
    handle.remove()
    return {
        "skipped": [outcome.skipped for outcome in seen],
        "diagnoses": [outcome.diagnosis for outcome in seen],
        "norm_overflow": beyond.skipped,
        "norm_overflow_counted_as_it_was": engine.optimizer_steps == optimizer_steps + (beyond.skipped is None),
        "finite_beyond": all(bool(tensor.isfinite().all()) for tensor in snapshot(engine).values()),
        "untouched": untouched,
        "moved_on": rank != 0 or not same(before, after),
        "finite": all(bool(tensor.isfinite().all()) for tensor in after.values()),
    }


def keeper(output: Path) -> CheckpointSaver:
    return CheckpointSaver(
        output=output,
        config=hf_config().to_dict(),
        generation_config={},
        tokenizer_files=(),
        dtype=torch.float32,
        from_master=True,
        max_shard_bytes=1 << 20,
        keep=0,
        resume_state=True,
        settings={},
    )


def resumed(adam: bool, rank: int, output: Path) -> dict[str, Any]:
    """Losses of steps 4 to 7: uninterrupted, resumed in the same layout, resumed in others."""
    engine = make_engine("zero3-offload-all", adam)
    for step in range(4):
        engine.train_step(mine(step_data(step), rank), SCHEDULE.rate(step))
    keeper(output).save(
        engine, RunPosition(step=4, samples=0, tokens=0, optimizer_steps=engine.optimizer_steps, skipped_in_a_row=0)
    )

    def go_on(engine: ZeroEngine) -> list[float]:
        return [engine.train_step(mine(step_data(step), rank), SCHEDULE.rate(step)).loss for step in range(4, 8)]

    losses = {"uninterrupted": go_on(engine)}
    final = snapshot(engine)
    bitwise = False
    for case in ("zero3-offload-all", "zero3", "zero2-offload", "zero1", *(["zero3-ratio"] if adam else [])):
        state = ResumeState(open_checkpoint(output / "resume"))
        again = make_engine(case, adam, fill=state.fill)
        state.restore(again)
        losses[case] = go_on(again)
        if case == "zero3-offload-all":
            bitwise = same(final, snapshot(again))
    return {"losses": losses, "bitwise": bitwise}


def failing_save(adam: bool) -> str:
    """What a rank hears when rank 0 cannot write."""
    engine = make_engine("zero3", adam)
    try:
        keeper(Path("/proc/no-such-place")).save(
            engine, RunPosition(step=1, samples=0, tokens=0, optimizer_steps=0, skipped_in_a_row=0)
        )
    except RunError as error:
        return str(error)
    return "nothing"


def leave() -> NoReturn:
    """End when all ranks have come so far."""
    dist.barrier()
    end_process(0)


def main(out: Path, library: str) -> None:
    rank = int(os.environ["RANK"])
    adam = bool(library)
    if adam:
        load_op("cpu_adam", Path(library))
    ds.start_ranks("cpu", rank)
    losses, start = reference()
    report: dict[str, Any] = {"reference": losses, "cpu_adam": adam}
    report["parity"] = {case: parity(case, adam, rank, start) for case in CASES if adam or case != "zero3-ratio"}
    report["parity"]["zero3-offload-torch"] = parity("zero3-offload", False, rank, start)
    report["pinned"] = {case: pinned(case, adam, rank, start) for case in ("zero2-offload", "zero3-offload-all")}
    report["not_finite"] = {
        f"{case}-{precision}": not_finite(make_engine(case, adam, precision), rank)
        for case in ("zero1", "zero2-offload", "zero3", "zero3-offload-all", *(["zero3-ratio"] if adam else []))
        for precision in ("fp32", "bf16")
    }
    reduced = mine(step_data(0), rank)
    report["reductions"] = {
        case: reductions(partial(make_engine, case, adam), reduced) for case in ("zero1", "zero2", "zero2-offload")
    }
    report["half"] = {case: half(case, adam, rank) for case in HALF}
    report["resumed"] = resumed(adam, rank, out / "resumed")
    report["failing_save"] = failing_save(adam)
    report["compiler"] = "torch._inductor.compile_fx" in sys.modules
    (out / f"rank-{rank}.json").write_text(json.dumps(report))
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
