"""Goes on from a checkpoint alone, where a run has no whole resume state: its weights and position, without the rest.

A kill or a full disk leaves that only in runs of earlier releases, which wrote the checkpoint first; so do ``save.resume_state:
false``, a resume state that was removed, and one that a disk has damaged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from checkpoint import CheckpointError, open_checkpoint
from checkpoint.disk.folder import Folder
from checkpoint.disk.manifest import MANIFEST, Manifest, check_hashes, check_sizes, load_manifest
from finetune.base_model.identity import Base, recorded_in
from finetune.config import TuneConfig
from finetune.config.learning_rate import FOR_ALL_KINDS
from finetune.engines.protocol import TrainingEngine
from finetune.errors import ConfigError
from finetune.model.adapters import as_peft_names_them
from finetune.model.build import Gather, fill, shapes_of, tied_names
from finetune.model.finite import found_in
from finetune.output.folder import CHECKPOINTS, LOG, step_folders
from finetune.output.log import tokens_at
from finetune.output.saves import newest_first
from finetune.train.changes import check_settings
from finetune.train.position import RunPosition

_LOST = "the optimizer's moments, the random states and the loss scale: no resume state is whole, so they start anew"


class SavedWeights:
    """An open checkpoint of a run that has no resume state; stands in for one."""

    def __init__(self, folder: Path, config: TuneConfig, lost: Sequence[str]) -> None:
        """Open the checkpoint and prove every byte of it.

        Raises:
            CheckpointError: it is not whole.
        """
        self.path = folder
        self.lost: tuple[str, ...] = (*lost, _LOST)
        files = Folder(folder)
        manifest = load_manifest(files)
        if manifest is None:
            raise CheckpointError(MANIFEST, "is missing")
        rounded = {entry.dtype for entry in manifest.tensors.values()} - {"F32", "F64"}
        if rounded:
            self.lost += (f"the digits of weights beyond {', '.join(sorted(rounded))}",)
        check_sizes(files, manifest)
        check_hashes(files, manifest)
        self._base = recorded_in(manifest.extra)
        self._settings: Mapping[str, Any] = manifest.extra.get("settings", {})
        self.course: Mapping[str, Any] = manifest.extra.get("course", {})
        # Releases that remembered no settings had one learning rate for every kind of run.
        unknown = None if self._settings else FOR_ALL_KINDS
        self.learning_rate: float | None = self.course.get("optimizer.lr", unknown)
        self.position = _position(manifest, config)
        unproved = [what for what, known in (("data and order", self._settings), ("batch", self.course)) if not known]
        if unproved:
            self.lost += (f"the proof that {', '.join(unproved)} are those of before: {folder} records nothing of them",)
        if "progress" not in manifest.extra:
            self.lost += (f"the position: it is taken for {config.step_samples} samples a step, as steps have now",)
        self._adapter = load_file(folder / "adapter_model.safetensors") if config.lora is not None else None
        self._checkpoint = open_checkpoint(folder) if config.lora is None else None

    def check(self, settings: Mapping[str, Any], base: Base | None, known_as: Sequence[str] = ()) -> None:
        """Refuse weights of another run, as ``ResumeState.check`` does, by what the checkpoint remembers."""
        check_settings(self.path, self._settings, settings, known_as)
        if base is not None and self._base is not None and not base.is_recorded_as(self._base):
            raise ConfigError(f"model.path: {base} is not what {self.path} was trained beside: {self._base}")

    def fill(self, model: PreTrainedModel, gather: Gather) -> None:
        """Give an empty model the weights of this checkpoint.

        Raises:
            ConfigError: the checkpoint's tensors are not the model's, or one is not finite.
        """
        assert self._checkpoint is not None, "adapters stand beside a base that is filled otherwise"
        try:
            self._checkpoint.check_tensors(shapes_of(model), tied=tied_names(model))
            with found_in(f"run.resume: {self.path}"):
                fill(model, lambda name: self._read(model, name), gather)
        except CheckpointError as error:
            raise ConfigError(f"run.resume: {self.path}: {error}") from error

    def fill_adapters(self, model: nn.Module, gather: Gather) -> None:
        """Give the trained parameters of a model with adapters the weights of this checkpoint.

        Raises:
            ConfigError: the checkpoint's tensors are not the adapters', or one is not finite.
        """
        with found_in(f"run.resume: {self.path}"):
            fill(model, lambda name: self._read(model, name), gather, trained=True)

    def restore(self, engine: TrainingEngine) -> None:
        """Set the optimizer's fp32 weights; all else of it is as at the start."""
        engine.set_master_weights(lambda name: self._read(engine.model, name))

    def _read(self, model: nn.Module, name: str) -> torch.Tensor:
        if self._checkpoint is not None:
            return self._checkpoint.read(self._checkpoint.resolve(name, tied_names(model)), dtype=torch.float32)
        assert self._adapter is not None, "one of the two is open"
        stored = next(iter(as_peft_names_them(model, {name: torch.empty(0)})))
        if stored not in self._adapter:
            raise ConfigError(f"run.resume: {self.path}: has no tensor {stored!r}; it is an adapter of another kind")
        return self._adapter[stored].float()


def _position(manifest: Manifest, config: TuneConfig) -> RunPosition:
    """How far the run had come: as its manifest says, or worked out from the step and the log."""
    known = manifest.extra.get("progress")
    if known is not None:
        return replace(RunPosition.recorded(known), optimizer_steps=0, loss_scale=None)
    samples = manifest.step * config.step_samples
    tokens = tokens_at(Path(config.run.output) / LOG, manifest.step) or samples * config.data.seq_len
    return RunPosition(step=manifest.step, samples=samples, tokens=tokens, optimizer_steps=0, skipped_in_a_row=0)


def find_weights(config: TuneConfig, broken: Sequence[str]) -> SavedWeights | None:
    """The newest whole checkpoint of the run; ``None`` if it has none at all.

    Args:
        broken: resume states that are not whole, and why.

    Raises:
        ConfigError: there are checkpoints, but none is whole.
    """
    root = Path(config.run.output) / CHECKPOINTS
    if not step_folders(root):
        return None
    reasons = list(broken)
    for folder in newest_first(root):
        try:
            return SavedWeights(folder, config, [f"the save in {reason}" for reason in reasons])
        except (CheckpointError, OSError) as error:
            reasons.append(f"{folder}: {error}")
    raise ConfigError(f"run.resume: no save of {config.run.output} is whole ({'; '.join(reasons)}); name another run.output")
