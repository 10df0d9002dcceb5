"""Writes what a run keeps: the served checkpoint and the resume state. Rank 0 writes; all ranks learn whether it worked.

``<output>/checkpoints/step-…`` is a plain transformers folder. ``<output>/resume/step-…`` has the same layout and holds fp32
weights, moments and random states under whole-tensor names: it belongs to no number of ranks and holds no pickle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from checkpoint import CheckpointWriter
from finetune.base_model.identity import Base, recorded
from finetune.engines.protocol import TrainingEngine
from finetune.errors import RunError
from finetune.machine import pages
from finetune.output.folder import CHECKPOINTS, RESUME, SNAPSHOTS, prune
from finetune.output.saves import is_whole
from finetune.train.position import RunPosition


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaver:
    """Writes the checkpoints, resume states and snapshots of one run: where, in which type, and how many are kept."""

    output: Path
    config: Mapping[str, Any]
    """``config.json`` of the served checkpoint."""
    generation_config: Mapping[str, Any]
    tokenizer_files: tuple[Path, ...]
    dtype: torch.dtype
    """Data type of the served weights."""
    from_master: bool
    """Serve the optimizer's fp32 weights rather than those that compute."""
    max_shard_bytes: int
    keep: int
    resume_state: bool
    settings: Mapping[str, Any]
    """What a resumed run must agree with; see ``finetune.train.changes``."""
    base: Base | None = None
    """The checkpoint that a run began with, remembered by what cannot go on without it, or tells it from others by it."""
    course: Mapping[str, Any] = field(default_factory=dict)
    """What a resumed run tells changes of; see ``finetune.train.changes``."""
    adapter_config: Mapping[str, Any] | None = None
    """``adapter_config.json`` of a run that trains adapters; its checkpoints are then peft's folders."""
    say: Callable[[str], None] = print
    """Tells the reader, on rank 0, what else is to be known of a save."""
    told: set[Path] = field(default_factory=set)
    """Saves of which it was said that they cannot be removed."""

    def save(self, engine: TrainingEngine, position: RunPosition) -> Path:
        """Write both; then remove what is older than ``keep``, or of a course that the run has left. All ranks call it.

        The resume state comes first: whoever is stopped between the two can go on from it exactly, and makes up for the
        other (``save_missing``). The other way round, the first save of a run could leave weights alone.

        Raises:
            RunError: on every rank, when rank 0 could not write; the saves before are untouched.
        """
        written = []
        if self.resume_state:
            states = engine.rng_states()
            extra = self._extra(position, self.base)
            written.append(self._write(engine, RESUME, position, lambda: _resume_tensors(engine, states), extra))
        served = self._write_weights(engine, CHECKPOINTS, position)
        if engine.rank == 0:
            for folder in (*written, served):
                self._prune(folder)
        return served

    def _prune(self, written: Path) -> None:
        for folder in prune(written, self.keep):
            if folder not in self.told:
                self.say(f"{folder} is being served, and stays beside the newest {self.keep} until a save after that")
                self.told.add(folder)

    def save_missing(self, engine: TrainingEngine, position: RunPosition) -> Path | None:
        """Write the checkpoint that belongs to the state just resumed from, if it is not there. All ranks call it.

        Returns:
            Its folder, if it was missing.

        Raises:
            RunError: on every rank, when rank 0 could not write; the saves before are untouched.
        """
        there = engine.rank != 0 or is_whole(self.output / CHECKPOINTS / f"step-{position.step:08d}")
        return None if engine.agree(there) else self._write_weights(engine, CHECKPOINTS, position)

    def snapshot(self, engine: TrainingEngine, position: RunPosition) -> Path:
        """Write the served weights alone into ``<output>/snapshots/step-…``, which no later save removes. All ranks call it.

        Returns:
            The new folder.

        Raises:
            RunError: on every rank, when rank 0 could not write; the saves before are untouched.
        """
        return self._write_weights(engine, SNAPSHOTS, position)

    def _write_weights(self, engine: TrainingEngine, root: str, position: RunPosition) -> Path:
        extra = self._extra(position, None if self.adapter_config is None else self.base)
        return self._write(engine, root, position, lambda: engine.weights(self.dtype, from_master=self.from_master), extra)

    def _extra(self, position: RunPosition, base: Base | None) -> dict[str, Any]:
        of_run = {"settings": dict(self.settings), "course": dict(self.course)}
        return {"progress": position.record(), **of_run, **recorded(base)}

    def _write(
        self,
        engine: TrainingEngine,
        root: str,
        position: RunPosition,
        tensors: Callable[[], Iterable[tuple[str, torch.Tensor | None]]],
        extra: Mapping[str, Any],
    ) -> Path:
        """Gather on all ranks, write on rank 0. A failing disk ends the writing, not the gathering: the others would wait."""
        pages.give_back()  # whole weights and what is written are of other sizes than what a step makes
        writer: CheckpointWriter | None = None
        failure: Exception | None = None
        folder = self.output / root / f"step-{position.step:08d}"
        if engine.rank == 0:
            try:
                writer = self._writer(root, position, extra)
            except Exception as error:
                failure = error
        for name, tensor in tensors():
            if writer is not None and failure is None and tensor is not None:
                try:
                    writer.add(name, tensor)
                except Exception as error:
                    failure = error
        if writer is not None:
            try:
                folder = writer.commit() if failure is None else folder
            except Exception as error:
                failure = error
            if failure is not None:
                writer.abort()
        if not engine.agree(failure is None):
            raise RunError(f"{folder}: the save of step {position.step} failed: {failure or 'see rank 0'}") from failure
        pages.give_back()
        return folder

    def _writer(self, root: str, position: RunPosition, extra: Mapping[str, Any]) -> CheckpointWriter:
        served = root != RESUME
        return CheckpointWriter(
            self.output / root,
            step=position.step,
            config=self.config,
            adapter_config=self.adapter_config if served else None,
            generation_config=self.generation_config if self.adapter_config is None else None,
            tokenizer_files=self.tokenizer_files if served else (),
            max_shard_bytes=self.max_shard_bytes,
            extra=extra,
        )


def _resume_tensors(engine: TrainingEngine, rng_states: list[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor | None]]:
    for name, tensor in engine.master_weights():
        yield f"master.{name}", tensor
    yield from engine.optimizer_state()
    for rank, state in enumerate(rng_states):
        yield f"rng.{engine.device.type}.{rank}", state
