"""Finds the newest whole resume state of a run, checks that it belongs to this configuration, and gives it back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from checkpoint import Checkpoint, CheckpointError, open_checkpoint, resolve_latest
from finetune.config import TuneConfig
from finetune.data.tokenise import Prepared
from finetune.engines import TrainingEngine
from finetune.errors import ConfigError
from finetune.finite import check_finite, found_in
from finetune.folders import RESUME, step_folders
from finetune.learning_rate import FOR_ALL_KINDS
from finetune.model import Gather, fill
from finetune.types import Progressed


def settings_of(config: TuneConfig, prepared: Prepared, hf_config: Any) -> dict[str, Any]:
    """What decides the course of a run: a resumed one must agree in all of it to be exact."""
    shape = {key: value for key, value in hf_config.to_dict().items() if isinstance(value, int | float | str | bool)}
    for name in ("transformers_version", "use_cache", "dtype"):
        shape.pop(name, None)
    return {
        "data": prepared.fingerprint,
        "data.seq_len": config.data.seq_len,
        "data.seed": config.data.seed,
        "samples of a step": config.step_samples,
        "model": shape,
        "optimizer": config.algorithm,
        "offload.zenflow": asdict(config.offload.zenflow) if config.algorithm == "zenflow" else None,
        "lora": None if config.lora is None else {**asdict(config.lora), "targets": list(config.lora.targets)},
    }


class ResumeState:
    """An open resume state."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        assert checkpoint.manifest is not None, "a resume state is written with a manifest"
        extra = checkpoint.manifest.extra
        try:
            self.progressed = Progressed(**extra["progress"])
            self._settings: Mapping[str, Any] = extra["settings"]
            self.learning_rate = float(extra.get("learning_rate", FOR_ALL_KINDS))
        except (KeyError, TypeError) as error:
            raise ConfigError(f"{checkpoint.path / 'manifest.json'}: is not a resume state of this release: {error}") from error

    @property
    def path(self) -> Path:
        return self._checkpoint.path

    def check(self, settings: Mapping[str, Any]) -> None:
        """Refuse a state of another run.

        Raises:
            ConfigError: names what differs.
        """
        differing = [name for name, value in settings.items() if self._settings.get(name) != value]
        if differing:
            what = ", ".join(f"{name} (was {self._settings.get(name)!r}, is {settings[name]!r})" for name in differing)
            raise ConfigError(
                f"run.resume: {self.path} cannot be continued, since these differ: {what}; name another run.output"
            )

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
        engine.set_exact_weights(self.master)
        engine.set_moments(self.moment, self.progressed.adam_steps)
        if engine.loss_scale is not None and self.progressed.loss_scale is not None:
            engine.loss_scale.value, engine.loss_scale.good_steps = self.progressed.loss_scale
        name = f"rng.{engine.device.type}.{engine.rank}"
        if name in self._checkpoint.tensors:
            engine.set_rng_state(self._checkpoint.read(name))


def find_resume_state(output: Path) -> ResumeState | None:
    """The newest whole resume state of the run in ``output``; ``None`` if there never was one.

    Raises:
        ConfigError: there are saves, but none is whole.
    """
    root = output / RESUME
    if not step_folders(root):
        return None
    try:
        return ResumeState(open_checkpoint(resolve_latest(root), verify="sha256"))
    except CheckpointError as error:
        raise ConfigError(f"run.resume: {root}: {error}") from error
