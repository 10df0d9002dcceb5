"""How a run begins on one rank: model, data, schedule and saves become a ``Trainer``, a run before is gone on from."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import PretrainedConfig

from checkpoint.text.tokenizer_files import TOKENIZER_FILES
from finetune.config import TuneConfig
from finetune.config.learning_rate import with_rate
from finetune.data.pack import SampleOrder, Share
from finetune.data.prepared import Prepared, described
from finetune.data.rows import open_rows
from finetune.engines.protocol import Fill, FillAdapters, TrainingEngine
from finetune.engines.zero.engine import ZeroEngine
from finetune.machine import pages
from finetune.machine.nvme import Disk
from finetune.model.adapters import adapter_config_of
from finetune.model.build import saved_config, shapes_of
from finetune.model.dtypes import DTYPES
from finetune.model.isolation import check_isolation
from finetune.output.folder import LOG
from finetune.output.log import last_step
from finetune.train.changes import changes_in_words, course_of, settings_of
from finetune.train.initial_model import InitialModel
from finetune.train.position import RunPosition
from finetune.train.recovery import SavedWeights
from finetune.train.resume import ResumeState, find_resume_state
from finetune.train.saving import CheckpointSaver
from finetune.train.schedule import make_schedule
from finetune.train.trainer import Samples, Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a rank trains, once everything before training is ready."""

    config: TuneConfig
    prepared: Prepared
    device: torch.device
    precision: str
    """``bf16``, ``fp16`` or ``fp32``."""
    cpu_adam: bool
    """Whether DeepSpeed's optimizer on the CPU is built and loaded."""
    disk: Disk | None = None
    """Set when anything is offloaded to NVMe."""
    swap: Path | None = None
    """The run's folder on that disk, held by who runs the job."""
    pipeline: bool = False
    """Whether the layers are spread over stages (``pretrain``) rather than repeated."""


def run_rank(job: Job, console: Console, should_stop: Callable[[], bool]) -> None:
    """Train to the end of the schedule, or until ``should_stop`` or ``run.max_minutes`` says so, and save.

    Args:
        console: rank 0 writes its progress here.
        should_stop: asked once per step; when true on any rank, all ranks save together and end.

    Raises:
        FinetuneError: the configuration, the model or the training is at fault.
    """
    limit = job.config.run.max_minutes
    end = None if limit is None else time.monotonic() + limit * 60
    trainer = begin(job, console)
    if not trainer.finished:
        trainer.train_shown(lambda: should_stop() or (end is not None and time.monotonic() >= end))
    elif trainer.engine.rank == 0:
        console.print(f"nothing to do: the schedule's {trainer.schedule.steps} steps are done", highlight=False)
    trainer.engine.close()


def begin(job: Job, console: Console) -> Trainer:
    """Build the model and its engine, give them their first weights or those of the newest save, and say what will be done.

    All ranks call it.

    Raises:
        ConfigError: the configuration, the model, or what is resumed is at fault.
    """
    state = find_resume_state(job.config) if job.config.run.resume == "auto" else None
    config, rate_in_words = with_rate(job.config, None if state is None else state.learning_rate)
    job = replace(job, config=config)
    rows, held_out = open_rows(job.prepared, "train"), open_rows(job.prepared, "eval")
    initial = InitialModel(config, job.prepared)
    check_isolation(initial.hf_config, job.prepared.packing)
    settings = settings_of(config, job.prepared, initial.hf_config)
    if state is not None:
        state.check(settings, None if config.lora is None else initial.base, job.prepared.known_as)
    schedule = make_schedule(config, rows.num_samples, None if state is None else state.position)
    course = course_of(config, initial.hf_config, schedule, job.precision)
    # Before the engine: training changes the configuration it is given.
    saver = _saver(job, initial, settings, course, console)
    fill = initial.fill if state is None or config.lora is not None else state.fill
    engine = _engine(job, initial.hf_config, fill, None if state is None else state.fill_adapters)
    if config.lora is not None:
        saver = replace(saver, adapter_config=adapter_config_of(engine.model))
    # Dropout differs between ranks; it starts here, so that building the model does not move it.
    torch.manual_seed(config.run.seed + 1 + engine.rank)
    if state is not None:
        state.restore(engine)
    elif initial.from_checkpoint and job.precision != "fp32" and config.lora is None:
        # The optimizer starts from the checkpoint's own numbers, not from their rounding to 16 bits.
        engine.set_master_weights(initial.reader(engine.model))
    samples = Samples(
        rows=rows,
        held_out=held_out,
        order=SampleOrder(rows.num_samples, config.data.seed),
        share=Share(engine.data_rank, engine.data_ranks, config.batch.micro, config.accumulation),
    )
    position = RunPosition() if state is None else state.position
    if engine.rank == 0:
        steps = f"{schedule.steps} steps of {samples.share.step_samples} x {config.data.seq_len} tokens"
        lines = ["; ".join([*_model_in_words(job, initial, engine), steps, rate_in_words]), *engine.describe()]
        for line in [*lines, *_resumed_in_words(config, state, position, course)]:
            console.print(line, highlight=False, soft_wrap=True, markup=False)
    saved = None if state is None else (position.step, _made_up(saver, engine, state, console))
    pages.give_back()  # what a checkpoint was read through
    return Trainer(config, engine, samples, schedule, saver, position, saved, console)


def _made_up(saver: CheckpointSaver, engine: TrainingEngine, state: ResumeState | SavedWeights, console: Console) -> Path:
    """The save that a run goes on from; the checkpoint that it was stopped before writing is written now."""
    written = saver.save_missing(engine, state.position)
    if written is None:
        return state.path
    if engine.rank == 0:
        console.print(f"written now, since it was missing: {written}", highlight=False, soft_wrap=True)
    return written


def _model_in_words(job: Job, initial: InitialModel, engine: TrainingEngine) -> list[str]:
    """The model, and what it is trained by and on."""
    config = job.config
    sizes = {name: torch.Size(shape).numel() for name, shape in shapes_of(engine.model).items()}
    count, trained = sum(sizes.values()), sum(sizes[name] for name, p in engine.model.named_parameters() if p.requires_grad)
    places = {what: getattr(config.offload, what) for what in ("optimizer", "parameters")}
    offload = [f"{what} on {place}" for what, place in places.items() if place != "none"]
    offload += [config.offload.method] if config.offload.method != "plain" else []
    return [
        f"{initial.name}, {count:,} parameters" + (f", {trained:,} trained" if trained < count else ""),
        *([f"{config.pipeline.stages} pipeline stages"] if job.pipeline else []),
        f"ZeRO-{config.zero.stage}{' with ' + ' and '.join(offload) if offload else ''}",
        f"{engine.world_size} rank{'s' if engine.world_size > 1 else ''} on {job.device.type}, {job.precision}",
        described(job.prepared),
    ]


def _resumed_in_words(
    config: TuneConfig, state: ResumeState | SavedWeights | None, position: RunPosition, course: Mapping[str, Any]
) -> list[str]:
    """Where a run goes on, what of it is lost, and what changed."""
    found = [] if state is None else [f"resumed at step {position.step} from {state.path}"]
    found += [f"lost: {what}" for what in (() if state is None else state.lost)]
    logged = last_step(Path(config.run.output) / LOG)
    if logged > position.step:
        found.append(f"lost: what was not saved, steps {position.step + 1} to {logged}; they are taken again")
    return found + ([] if state is None else changes_in_words(state.course, course))


def _engine(job: Job, hf_config: PretrainedConfig, fill: Fill, fill_adapters: FillAdapters | None) -> TrainingEngine:
    if job.pipeline:
        from finetune.engines.pipeline.engine import PipelineEngine

        return PipelineEngine(job.config, hf_config, fill, device=job.device, precision=job.precision)
    disk = None if job.disk is None or job.swap is None else (job.disk, job.swap)
    return ZeroEngine(
        job.config,
        hf_config,
        fill,
        fill_adapters=fill_adapters,
        device=job.device,
        precision=job.precision,
        cpu_adam=job.cpu_adam,
        disk=disk,
        isolated=job.prepared.packing == "isolate",
    )


def _saver(
    job: Job, initial: InitialModel, settings: Mapping[str, Any], course: Mapping[str, Any], console: Console
) -> CheckpointSaver:
    save = job.config.save
    dtype = DTYPES[job.precision if save.dtype == "auto" else save.dtype]
    files = (job.prepared.tokenizer_folder / name for name in TOKENIZER_FILES)
    return CheckpointSaver(
        output=Path(job.config.run.output),
        config=saved_config(initial.hf_config, dtype),
        generation_config=initial.generation_config,
        tokenizer_files=tuple(file for file in files if file.is_file()),
        dtype=dtype,
        from_master=save.dtype == "float32",
        max_shard_bytes=save.max_shard_mib << 20,
        keep=save.keep,
        resume_state=save.resume_state,
        settings=settings,
        course=course,
        base=initial.base,
        say=lambda line: console.print(line, highlight=False, soft_wrap=True, markup=False),
    )
