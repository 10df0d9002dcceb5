"""Finds the newest whole resume state of a run, checks that it belongs to this configuration, and gives it back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from checkpoint import Checkpoint, CheckpointError, open_checkpoint
from finetune.base_model.identity import Base, recorded_in
from finetune.config import TuneConfig
from finetune.config.learning_rate import FOR_ALL_KINDS
from finetune.engines.protocol import TrainingEngine
from finetune.errors import ConfigError
from finetune.model.build import Gather, fill
from finetune.model.finite import check_finite, found_in
from finetune.output.folder import RESUME
from finetune.output.saves import newest_first
from finetune.train.changes import check_settings
from finetune.train.position import RunPosition
from finetune.train.recovery import SavedWeights, find_weights


class ResumeState:
    """An open resume state: fp32 weights, moments and random states of a run, and the position they belong to."""

    lost: tuple[str, ...] = ()
    """What newer saves held that are not whole."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        assert checkpoint.manifest is not None, "a resume state is written with a manifest"
        extra = checkpoint.manifest.extra
        try:
            self.position = RunPosition.recorded(extra["progress"])
            self._settings: Mapping[str, Any] = extra["settings"]
            self._base = recorded_in(extra)
            told = {key: self._settings[key] for key in ("samples of a step",) if key in self._settings}  # by earlier releases
            self.course: Mapping[str, Any] = extra.get("course", told)
        except (KeyError, TypeError) as error:
            raise ConfigError(f"{checkpoint.path / 'manifest.json'}: is not a resume state of this release: {error}") from error

    @property
    def path(self) -> Path:
        return self._checkpoint.path

    @property
    def learning_rate(self) -> float:
        """The learning rate that the saved run had after warm-up."""
        return float(self.course.get("optimizer.lr", FOR_ALL_KINDS))

    def check(self, settings: Mapping[str, Any], base: Base | None, known_as: Sequence[str] = ()) -> None:
        """Refuse a state of another run, and adapters that were trained beside another base.

        Args:
            settings: see ``finetune.train.changes.settings_of``.
            base: what the adapters of the run lie beside; ``None`` of a whole model.
            known_as: other names of the run's data.

        Raises:
            ConfigError: names what differs.
        """
        check_settings(self.path, self._settings, settings, known_as)
        if base is not None and self._base is not None and not base.is_recorded_as(self._base):
            raise ConfigError(f"model.path: {base} is not what the adapters of {self.path} were trained beside: {self._base}")

    def master(self, name: str) -> torch.Tensor:
        """The fp32 weight called ``name`` by the model."""
        return self._checkpoint.read(f"master.{name}")

    def moment(self, name: str) -> torch.Tensor:
        """``exp_avg.<name>`` and so on, in fp32.

        Raises:
            WeightNotFinite: it would make the weight so in the first step.
        """
        tensor = self._checkpoint.read(name)
        with found_in(f"run.resume: {self.path}"):
            check_finite(name, tensor)
        return tensor

    def fill(self, model: PreTrainedModel, gather: Gather) -> None:
        """Give an empty model the weights of this state, in its own dtype."""
        with found_in(f"run.resume: {self.path}"):
            fill(model, self.master, gather)

    def fill_adapters(self, model: nn.Module, gather: Gather) -> None:
        """Give the trained parameters of a model with adapters the weights of this state."""
        with found_in(f"run.resume: {self.path}"):
            fill(model, self.master, gather, trained=True)

    def restore(self, engine: TrainingEngine) -> None:
        """Set weights, moments, the optimizer's step and, if the saved run had this rank, its random state."""
        engine.set_master_weights(self.master)
        engine.set_optimizer_state(self.moment, self.position.optimizer_steps)
        if engine.loss_scale is not None and self.position.loss_scale is not None:
            engine.loss_scale.value, engine.loss_scale.good_steps = self.position.loss_scale
        name = f"rng.{engine.device.type}.{engine.rank}"
        if name in self._checkpoint.tensors:
            engine.set_rng_state(self._checkpoint.read(name))


def find_resume_state(config: TuneConfig) -> ResumeState | SavedWeights | None:
    """The newest whole resume state of a run; where none is whole, its newest whole checkpoint; ``None`` if it has neither.

    Raises:
        ConfigError: there are saves, but none is whole.
    """
    root = Path(config.run.output) / RESUME
    reasons: list[str] = []
    for folder in newest_first(root):
        try:
            state = ResumeState(open_checkpoint(folder, verify="sha256"))
        except CheckpointError as error:
            reasons.append(f"{folder}: {error}")
            continue
        state.lost = tuple(f"the save in {reason}" for reason in reasons)
        return state
    weights = find_weights(config, reasons)
    if weights is None and reasons:
        raise ConfigError(f"run.resume: {root}: holds no whole resume state ({'; '.join(reasons)})")
    return weights
