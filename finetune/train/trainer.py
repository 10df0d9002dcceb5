"""One rank's whole training run: model, data, loop, evaluations, saves, end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console

from checkpoint.tokenizer_files import TOKENIZER_FILES
from finetune.config import TuneConfig
from finetune.config.learning_rate import with_rate
from finetune.data.batches import eval_batches, step_batches
from finetune.data.pack import SampleOrder, Share
from finetune.data.prepared import Prepared, described
from finetune.data.rows import open_rows
from finetune.engines.protocol import Fill, TrainingEngine
from finetune.engines.zero.engine import ZeroEngine
from finetune.errors import LossSpike, NotFinite, RunError
from finetune.machine.nvme import Disk
from finetune.model.adapters import adapter_config_of
from finetune.model.build import saved_config, shapes_of
from finetune.model.isolation import check_isolation
from finetune.observe.gauges import Gauges
from finetune.observe.plot import draw_losses
from finetune.observe.progress import RunProgress, speed_in_words
from finetune.observe.spikes import Spike, SpikeWatch
from finetune.output.folder import LOG
from finetune.output.log import last_step
from finetune.train.changes import changes_in_words, course_of, settings_of
from finetune.train.initial_model import Origin
from finetune.train.position import Progressed
from finetune.train.recovery import SavedWeights
from finetune.train.resume import ResumeState, find_resume_state
from finetune.train.saving import Keeper
from finetune.train.schedule import make_schedule

DTYPES: Final[Mapping[str, torch.dtype]] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
NOT_FINITE_LIMIT = 3
"""Skipped steps in a row that end a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What the ranks are told once everything before training is ready."""

    config: TuneConfig
    prepared: Prepared
    device: torch.device
    precision: str
    cpu_adam: bool
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
    began = time.monotonic()
    run = _Run(job, console)
    if run.finished:
        if run.engine.rank == 0:
            console.print(f"nothing to do: the schedule's {run.schedule.steps} steps are done", highlight=False)
    else:
        run.train(should_stop, began)
    run.engine.close()


class _Run:
    """The state of a run on one rank. All its methods are collective."""

    def __init__(self, job: Job, console: Console) -> None:
        prepared = job.prepared
        self._output = Path(job.config.run.output)
        state = find_resume_state(job.config) if job.config.run.resume == "auto" else None
        config, self._rate_in_words = with_rate(job.config, None if state is None else state.learning_rate)
        job = replace(job, config=config)
        self.config, self._console = config, console
        self._rows, self._held_out = open_rows(prepared, "train"), open_rows(prepared, "eval")
        self._order = SampleOrder(self._rows.num_samples, config.data.seed)

        origin = Origin(config, prepared)
        check_isolation(origin.hf_config, prepared.packing)
        settings = settings_of(config, prepared, origin.hf_config)
        if state is not None:
            state.check(settings, None if config.lora is None else origin.base, prepared.known_as)
        self.schedule = make_schedule(config, self._rows.num_samples, None if state is None else state.progressed)
        course = course_of(config, origin.hf_config, self.schedule, job.precision)
        # Before the engine: training changes the configuration it is given.
        self._keeper = _keeper(job, origin, settings, course)
        fill = origin.fill if state is None or config.lora is not None else state.fill
        self.engine = _engine(job, origin.hf_config, fill, None if state is None else state.fill_adapters)
        if config.lora is not None:
            self._keeper = replace(self._keeper, adapter_config=adapter_config_of(self.engine.model))
        self._share = Share(self.engine.data_rank, self.engine.data_ranks, config.batch.micro, config.accumulation)
        self._progressed = Progressed(step=0, samples=0, tokens=0, adam_steps=0, skipped_in_a_row=0)
        self._last_save: Path | None = None
        self._spikes = SpikeWatch(config.spike)
        self._spike: Spike | None = None
        self._diagnosis: str | None = None
        """Of the first of the latest steps that were skipped."""
        self._saves: list[tuple[int, Path]] = []
        # Dropout differs between ranks; it starts here, so that building the model does not move it.
        torch.manual_seed(config.run.seed + 1 + self.engine.rank)
        if state is not None:
            state.restore(self.engine)
            self._progressed, self._last_save = state.progressed, state.path
            self._saves.append((state.progressed.step, state.path))
        elif origin.from_checkpoint and job.precision != "fp32" and config.lora is None:
            # The optimizer starts from the checkpoint's own numbers, not from their rounding to 16 bits.
            self.engine.set_exact_weights(origin.reader(self.engine.model))
        if self.engine.rank == 0:
            self._introduce(job, origin, state, course)
        if state is not None:
            self._make_up(state)

    @property
    def finished(self) -> bool:
        return self._progressed.step >= self.schedule.steps

    def _make_up(self, state: ResumeState | SavedWeights) -> None:
        """Write the checkpoint that a run was stopped before."""
        written = self._keeper.save_missing(self.engine, state.progressed)
        if written is not None:
            self._last_save = written
            if self.engine.rank == 0:
                self._console.print(f"written now, since it was missing: {written}", highlight=False, soft_wrap=True)

    def _introduce(self, job: Job, origin: Origin, state: ResumeState | SavedWeights | None, course: Mapping[str, Any]) -> None:
        sizes = {name: torch.Size(shape).numel() for name, shape in shapes_of(self.engine.model).items()}
        count, trained = sum(sizes.values()), sum(sizes[n] for n, p in self.engine.model.named_parameters() if p.requires_grad)
        places = {what: getattr(self.config.offload, what) for what in ("optimizer", "parameters")}
        offload = [f"{what} on {place}" for what, place in places.items() if place != "none"]
        offload += [self.config.offload.method] if self.config.offload.method != "plain" else []
        parts = [
            f"{origin.name}, {count:,} parameters" + (f", {trained:,} trained" if trained < count else ""),
            *([f"{self.config.pipeline.stages} pipeline stages"] if job.pipeline else []),
            f"ZeRO-{self.config.zero.stage}{' with ' + ' and '.join(offload) if offload else ''}",
            f"{self.engine.world_size} rank{'s' if self.engine.world_size > 1 else ''} on {job.device.type}, {job.precision}",
            described(job.prepared),
            f"{self.schedule.steps} steps of {self._share.step_samples} x {self.config.data.seq_len} tokens",
            self._rate_in_words,
        ]
        for line in ("; ".join(parts), *self.engine.describe()):
            self._console.print(line, highlight=False, soft_wrap=True)
        for line in self._resumed_in_words(state, course):
            self._console.print(line, highlight=False, soft_wrap=True, markup=False)

    def _resumed_in_words(self, state: ResumeState | SavedWeights | None, course: Mapping[str, Any]) -> list[str]:
        """Where a run goes on, what of it is lost, and what changed."""
        done = self._progressed.step
        found = [] if state is None else [f"resumed at step {done} from {state.path}"]
        found += [f"lost: {what}" for what in (() if state is None else state.lost)]
        logged = last_step(self._output / LOG)
        if logged > done:
            found.append(f"lost: what was not saved, steps {done + 1} to {logged}; they are taken again")
        return found + ([] if state is None else changes_in_words(state.course, course))

    # -- the loop

    def train(self, should_stop: Callable[[], bool], began: float) -> None:
        """Step until the schedule ends or someone stops the run; the last step is always saved."""
        if self.engine.rank != 0:
            self._loop(None, should_stop, began)
            return
        started = self._progressed
        tokens = self._share.step_samples * self.config.data.seq_len
        gauges = Gauges(self.config, self.engine.device, ranks=self.engine.world_size, step_tokens=tokens)
        with RunProgress(self._console, self.config, gauges, steps=self.schedule.steps, done=started.step) as progress:
            clock = time.monotonic()
            self._loop(progress, should_stop, began)
            seconds = time.monotonic() - clock
        self._summarise(seconds, (self._progressed.step - started.step) * tokens, self._progressed.tokens - started.tokens)

    def _loop(self, progress: RunProgress | None, should_stop: Callable[[], bool], began: float) -> None:
        limit = self.config.run.max_minutes
        saved_at = -1
        while not self.finished:
            stop = should_stop() or (limit is not None and time.monotonic() - began >= limit * 60)
            stopping = self._step(progress, stop)
            step = self._progressed.step
            ending = stopping or self.finished or self._spike is not None
            if self.finished or _due(step, self.config.eval.every):  # not for a stop: who stops a run wants it to end
                self._evaluate(progress)
            if (ending or _due(step, self.config.save.every)) and not self._would_lose_good_save():
                self._save(progress)
                saved_at = step
            if _due(step, self.config.save.snapshot_every):
                self._snapshot(progress)
            if self._spike is not None:
                raise LossSpike(f"{self._spike}; {self._good_save_in_words(self._spike)} (spike.action: stop)")
            if stopping and not self.finished:
                if progress is not None:
                    progress.note(f"stopped after step {step} of {self.schedule.steps}; --resume goes on from here")
                break
        assert saved_at == self._progressed.step, "the last step of a run is always saved"

    def _step(self, progress: RunProgress | None, stop: bool) -> bool:
        done = self._progressed
        rate = self.schedule.rate(done.step)
        batches = step_batches(self._rows, self._order, self._share, done.samples)
        outcome = self.engine.train_step(batches, rate, stop=stop, diagnose=done.skipped_in_a_row == 0)
        scale = self.engine.loss_scale
        if outcome.skipped in ("loss", "gradient") and done.skipped_in_a_row == 0:
            self._diagnosis = outcome.diagnosis
        self._progressed = Progressed(
            step=done.step + 1,
            samples=done.samples + self._share.step_samples,
            tokens=done.tokens + outcome.num_targets,
            adam_steps=self.engine.adam_steps,
            skipped_in_a_row=done.skipped_in_a_row + 1 if outcome.skipped in ("loss", "gradient") else 0,
            loss_scale=None if scale is None else (scale.value, scale.good_steps),
        )
        if progress is not None:
            progress.step(self._progressed.step, outcome, rate, self._progressed.tokens)
        if not outcome.skipped:
            self._watch(outcome.loss, progress)
        if self._progressed.skipped_in_a_row >= NOT_FINITE_LIMIT:
            last = self._last_save or "none was saved yet"
            where = f"; it began with {self._diagnosis}" if self._diagnosis else ""
            raise NotFinite(
                f"the {outcome.skipped} was not a finite number {NOT_FINITE_LIMIT} steps in a row, last at step "
                f"{self._progressed.step}{where}; last good checkpoint: {last}. Lower optimizer.lr, or look at the data of "
                "these steps" + ("" if scale is None else "; bf16 and fp32 hold larger numbers than fp16")
            )
        return outcome.stop

    # -- loss spikes

    def _watch(self, loss: float, progress: RunProgress | None) -> None:
        """Every rank sees the same losses and comes to the same verdict."""
        spike = self._spikes.see(self._progressed.step, loss)
        if spike is None:
            return
        if progress is not None:
            progress.spike(spike, self._good_save(spike))
        if self.config.spike.action == "stop":
            self._spike = spike

    def _good_save(self, spike: Spike) -> Path | None:
        return next((path for step, path in reversed(self._saves) if step < spike.first_step), None)

    def _good_save_in_words(self, spike: Spike) -> str:
        good = self._good_save(spike)
        return "none was saved before it" if good is None else f"last checkpoint before it: {good}"

    def _would_lose_good_save(self) -> bool:
        """After a spike a save must not push out the last good one."""
        return self._spike is not None and self.config.save.keep == 1 and self._good_save(self._spike) is not None

    def _evaluate(self, progress: RunProgress | None) -> None:
        batches = eval_batches(self._held_out, self._share, self.config.eval.samples)
        if not batches:
            return
        loss_sum, count = self.engine.evaluate(batches)
        if progress is not None:
            progress.evaluation(self._progressed.step, loss_sum / max(1, count))

    def _save(self, progress: RunProgress | None) -> None:
        began = time.monotonic()
        try:
            path = self._keeper.save(self.engine, self._progressed)
        except RunError as error:
            raise RunError(f"{error}; last good save: {self._last_save or 'none'}") from error
        self._last_save = path
        self._saves.append((self._progressed.step, path))
        if progress is not None:
            progress.saved(self._progressed.step, path, time.monotonic() - began)

    def _snapshot(self, progress: RunProgress | None) -> None:
        began = time.monotonic()
        try:
            path = self._keeper.snapshot(self.engine, self._progressed)
        except RunError as error:
            raise RunError(f"{error}; last good save: {self._last_save or 'none'}") from error
        if progress is not None:
            progress.saved(self._progressed.step, path, time.monotonic() - began)

    def _summarise(self, seconds: float, tokens: int, targets: int) -> None:
        if self.config.log.plot:
            draw_losses(self._output / LOG, self._output / "loss.png")
        say = self._console.print
        a_second = {"all_tokens_per_second": tokens / max(seconds, 1e-9), "tokens_per_second": targets / max(seconds, 1e-9)}
        say(f"done: {tokens:,} tokens ({targets:,} targets) in {seconds:.0f} s, {speed_in_words(a_second)}", highlight=False)
        say(f"checkpoint: {self._last_save}", highlight=False, soft_wrap=True)
        if self.config.lora is not None:
            say(f"merge it:   tessera-finetune merge {self._last_save} MERGED", highlight=False, soft_wrap=True)
        else:
            say(f"serve it:   tessera-serve --model {self._last_save}", highlight=False, soft_wrap=True)


def _engine(job: Job, hf_config: Any, fill: Fill, fill_adapters: Fill | None) -> TrainingEngine:
    common = {"device": job.device, "precision": job.precision}
    if job.pipeline:
        from finetune.engines.pipeline.engine import PipelineEngine

        return PipelineEngine(job.config, hf_config, fill, **common)
    disk = None if job.disk is None or job.swap is None else (job.disk, job.swap)
    return ZeroEngine(job.config, hf_config, fill, fill_adapters=fill_adapters, cpu_adam=job.cpu_adam, disk=disk, **common)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _keeper(job: Job, origin: Origin, settings: Mapping[str, Any], course: Mapping[str, Any]) -> Keeper:
    save = job.config.save
    dtype = DTYPES[job.precision if save.dtype == "auto" else save.dtype]
    files = (job.prepared.tokenizer_folder / name for name in TOKENIZER_FILES)
    return Keeper(
        output=Path(job.config.run.output),
        config=saved_config(origin.hf_config, dtype),
        generation_config=origin.generation_config,
        tokenizer_files=tuple(file for file in files if file.is_file()),
        dtype=dtype,
        exact=save.dtype == "float32",
        max_shard_bytes=save.max_shard_mib << 20,
        keep=save.keep,
        resume_state=save.resume_state,
        settings=settings,
        course=course,
        base=origin.base,
    )
