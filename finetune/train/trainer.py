"""The training loop: one rank's steps, evaluations and saves. Read ``Trainer.train`` first."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from finetune.config import TuneConfig
from finetune.data.batches import eval_batches, step_batches
from finetune.data.pack import SampleOrder, Share
from finetune.data.rows import Rows
from finetune.engines.protocol import StepOutcome, TrainingEngine
from finetune.errors import LossSpike, NotFinite, RunError
from finetune.observe.gauges import Gauges
from finetune.observe.plots import draw_losses
from finetune.observe.progress import RunProgress, speed_in_words
from finetune.observe.spikes import Spike, SpikeWatch
from finetune.output.folder import LOG
from finetune.train.position import RunPosition
from finetune.train.saving import CheckpointSaver
from finetune.train.schedule import Schedule

NOT_FINITE_LIMIT = 3
"""Skipped steps in a row that end a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """The rows of tokens of a run: what is trained on, in which order, and which of them this rank takes."""

    rows: Rows
    held_out: Rows
    order: SampleOrder
    share: Share


class Trainer:
    """A run on one rank. Its methods are collective: every rank calls them in the same order and comes to the same verdicts.

    ``finetune.train.begin.begin`` makes one of a configuration.

    Args:
        config: the run's settings, with a learning rate.
        engine: the model in training, with its first weights or those of the save that is gone on from.
        samples: what is trained on, and what is held out.
        schedule: the learning rate of each step, and how many steps there are.
        saver: writes checkpoints, resume states and snapshots.
        position: how far the run has come; a new run is at its beginning.
        saved: the step and folder of the save that the run goes on from.
        console: rank 0 writes its progress here.
    """

    def __init__(
        self,
        config: TuneConfig,
        engine: TrainingEngine,
        samples: Samples,
        schedule: Schedule,
        saver: CheckpointSaver,
        position: RunPosition,
        saved: tuple[int, Path] | None,
        console: Console,
    ) -> None:
        self.config, self.engine, self.schedule, self.position = config, engine, schedule, position
        self._samples, self._saver, self._console = samples, saver, console
        self._saves = [] if saved is None else [saved]
        self._spikes = SpikeWatch(config.spike)
        self._spike: Spike | None = None
        self._diagnosis: str | None = None
        """What the first of the latest skipped steps in a row was found to begin with."""
        self._progress: RunProgress | None = None
        """What rank 0 shows; ``None`` on the others."""

    def train(self, should_stop: Callable[[], bool]) -> None:
        """Take steps until the schedule ends or someone stops the run; the last step is always saved.

        Args:
            should_stop: asked once a step; when true on any rank, all ranks save together and end.

        Raises:
            NotFinite: several steps in a row could not be taken.
            LossSpike: the loss rose as ``spike.action: stop`` does not allow; what is right is saved.
            RunError: a save failed.
        """
        stopping = False
        while not (self.finished or stopping):
            stopping = self.step(stop=should_stop())
            step, last = self.position.step, self.finished or stopping or self._spike is not None
            if self.finished or _due(step, self.config.eval.every):  # not for a stop: who stops a run wants it to end
                self.evaluate()
            if (last or _due(step, self.config.save.every)) and not self._would_lose_good_save():
                self.save()
            if _due(step, self.config.save.snapshot_every):
                self.snapshot()
            if self._spike is not None:
                raise LossSpike(f"{self._spike}; {self._good_save_in_words(self._spike)} (spike.action: stop)")
        if not self.finished and self._progress is not None:
            self._progress.note(f"stopped after step {self.position.step} of {self.schedule.steps}; --resume goes on from here")

    def step(self, *, stop: bool = False) -> bool:
        """One optimizer step on the next samples; returns whether any rank was asked to stop. All ranks call it.

        A step whose loss or gradient is not finite changes no weight and counts all the same.

        Args:
            stop: whether this rank was asked to stop.

        Raises:
            NotFinite: it was the last of several in a row that could not be taken.
        """
        before, share = self.position, self._samples.share
        rate = self.schedule.rate(before.step)
        batches = step_batches(self._samples.rows, self._samples.order, share, before.samples)
        outcome = self.engine.train_step(batches, rate, stop=stop, diagnose=before.skipped_in_a_row == 0)
        scale = self.engine.loss_scale
        faulty = outcome.skipped in ("loss", "gradient")
        self.position = RunPosition(
            step=before.step + 1,
            samples=before.samples + share.step_samples,
            tokens=before.tokens + outcome.num_targets,
            optimizer_steps=self.engine.optimizer_steps,
            skipped_in_a_row=before.skipped_in_a_row + 1 if faulty else 0,
            loss_scale=None if scale is None else (scale.value, scale.good_steps),
        )
        if self._progress is not None:
            self._progress.step(self.position.step, outcome, rate, self.position.tokens)
        if faulty:
            self._refuse_more_of(outcome, first=before.skipped_in_a_row == 0)
        if not outcome.skipped:
            self._watch(outcome.loss)
        return outcome.stop

    def evaluate(self) -> None:
        """Measure the loss on what is held out, and show it; nothing where nothing is held out. All ranks call it."""
        batches = eval_batches(self._samples.held_out, self._samples.share, self.config.eval.samples)
        if not batches:
            return
        loss_sum, count = self.engine.evaluate(batches)
        if self._progress is not None:
            self._progress.evaluation(self.position.step, loss_sum / max(1, count))

    def save(self) -> None:
        """Write the checkpoint and the resume state of this position.

        Raises:
            RunError: on every rank, when rank 0 could not write; the saves before are untouched.
        """
        self._saves.append((self.position.step, self._written(self._saver.save)))

    def snapshot(self) -> None:
        """Write the weights of this step alone, as a snapshot that no later save removes. All ranks call it.

        Raises:
            RunError: on every rank, when rank 0 could not write.
        """
        self._written(self._saver.snapshot)

    @property
    def finished(self) -> bool:
        """Whether the schedule's last step is done."""
        return self.position.step >= self.schedule.steps

    @property
    def last_save(self) -> Path | None:
        """The newest checkpoint that this run wrote or goes on from."""
        return self._saves[-1][1] if self._saves else None

    # -- on rank 0

    def train_shown(self, should_stop: Callable[[], bool]) -> None:
        """``train``, shown on the console, logged and summed up by rank 0; arguments and errors are those of ``train``."""
        if self.engine.rank != 0:
            self.train(should_stop)
            return
        started, step_tokens = self.position, self._samples.share.step_samples * self.config.data.seq_len
        gauges = Gauges(
            self.config,
            self.engine.device,
            ranks=self.engine.world_size,
            step_tokens=step_tokens,
            dtype=next(self.engine.model.parameters()).dtype,
        )
        with RunProgress(self._console, self.config, gauges, steps=self.schedule.steps, done=started.step) as progress:
            self._progress, clock = progress, time.monotonic()
            self.train(should_stop)
            seconds = max(time.monotonic() - clock, 1e-9)
        self._progress = None
        self._sum_up(seconds, (self.position.step - started.step) * step_tokens, self.position.tokens - started.tokens)

    def _sum_up(self, seconds: float, tokens: int, targets: int) -> None:
        if self.config.log.plot:
            output = Path(self.config.run.output)
            draw_losses(output / LOG, output / "loss.png")
        speed = speed_in_words({"all_tokens_per_second": tokens / seconds, "tokens_per_second": targets / seconds})
        after = "serve it:   tessera-serve --model" if self.config.lora is None else "merge it:   tessera-finetune merge"
        for line in (
            f"done: {tokens:,} tokens ({targets:,} targets) in {seconds:.0f} s, {speed}",
            f"checkpoint: {self.last_save}",
            f"{after} {self.last_save}" + ("" if self.config.lora is None else " MERGED"),
        ):
            self._console.print(line, highlight=False, soft_wrap=True)

    # -- steps that go wrong

    def _refuse_more_of(self, outcome: StepOutcome, *, first: bool) -> None:
        """Keep what the first skipped step in a row was found to begin with; end the run at the last one allowed."""
        if first:
            self._diagnosis = outcome.diagnosis
        if self.position.skipped_in_a_row < NOT_FINITE_LIMIT:
            return
        where = f"; it began with {self._diagnosis}" if self._diagnosis else ""
        fp16 = self.engine.loss_scale is not None
        raise NotFinite(
            f"the {outcome.skipped} was not a finite number {NOT_FINITE_LIMIT} steps in a row, last at step "
            f"{self.position.step}{where}; last good checkpoint: {self.last_save or 'none was saved yet'}. Lower optimizer.lr, "
            "or look at the data of these steps" + ("; bf16 and fp32 hold larger numbers than fp16" if fp16 else "")
        )

    def _watch(self, loss: float) -> None:
        """Every rank sees the same losses and comes to the same verdict."""
        spike = self._spikes.see(self.position.step, loss)
        if spike is None:
            return
        if self._progress is not None:
            self._progress.spike(spike, self._good_save(spike))
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

    def _written(self, write: Callable[[TrainingEngine, RunPosition], Path]) -> Path:
        began = time.monotonic()
        try:
            path = write(self.engine, self.position)
        except RunError as error:
            raise RunError(f"{error}; last good save: {self.last_save or 'none'}") from error
        if self._progress is not None:
            self._progress.saved(self.position.step, path, time.monotonic() - began)
        return path


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
