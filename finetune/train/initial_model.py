"""Where a run's model comes from: an existing checkpoint, or starting values; and how its first weights get into place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from checkpoint import Checkpoint, CheckpointError
from finetune.base_model.identity import Base, at_fault, identified
from finetune.base_model.opened import open_base_model
from finetune.config import TuneConfig
from finetune.data.prepare import Prepared
from finetune.model.build import (
    Gather,
    check_fit,
    config_of,
    fill,
    generation_defaults,
    initialise,
    new_config,
    shapes_of,
    tied_names,
    with_stops,
)
from finetune.model.finite import found_in

Read = Callable[[str], torch.Tensor]
"""Reads one whole tensor by the model's name for it."""


class InitialModel:
    """The model of ``config.model`` before its first step.

    Raises:
        ConfigError: there is no such model, or tokenizer and data do not fit it.
    """

    def __init__(self, config: TuneConfig, prepared: Prepared) -> None:
        self._config = config
        self._checkpoint: Checkpoint | None = None
        self.base: Base | None = None
        """The checkpoint that the model is; ``None`` for a new one."""
        sizes = {"num_ids": prepared.num_ids, "seq_len": config.data.seq_len}
        if config.model.new is not None:
            self.hf_config = new_config(config.model.new, end_of_text_id=prepared.end_of_text_id, **sizes)
        else:
            assert config.model.path is not None, "ModelConfig holds exactly one of the two"
            try:
                self._checkpoint = open_base_model(config)
                self.base = identified(self._checkpoint)
            except CheckpointError as error:
                if self._checkpoint is not None:
                    self._checkpoint.close()
                raise at_fault(self._config, error) from error
            self.hf_config = config_of(self._checkpoint)
            check_fit(self.hf_config, key="model.path", **sizes)
        inherited = dict(self._checkpoint.generation_config) if self._checkpoint else {}
        defaults = inherited or generation_defaults(self.hf_config, prepared.end_of_text_id)
        self.generation_config: Mapping[str, Any] = with_stops(defaults, prepared.stop_ids)

    @property
    def name(self) -> str:
        """The model in words for the reader: a path, or the type of a new model."""
        new = self._config.model.new
        return str(self._config.model.path) if new is None else str(new["model_type"])

    @property
    def from_checkpoint(self) -> bool:
        return self._checkpoint is not None

    def fill(self, model: PreTrainedModel, gather: Gather) -> None:
        """Give an empty model its first weights.

        Raises:
            ConfigError: the checkpoint's tensors are not those of its config.json, or one is not finite.
        """
        if self._checkpoint is None:
            initialise(model, gather, self._config.run.seed)
            return
        try:
            self._checkpoint.check_tensors(shapes_of(model), tied=tied_names(model))
            with found_in(f"model.path: {self._config.model.path}"):
                fill(model, self.reader(model), gather)
        except CheckpointError as error:
            raise at_fault(self._config, error) from error

    def reader(self, model: nn.Module) -> Read:
        """Reads the checkpoint's own numbers in fp32, by the names of ``model``."""
        checkpoint, tied = self._checkpoint, tied_names(model)
        assert checkpoint is not None, "a new model has nothing to read"
        return lambda name: checkpoint.read(checkpoint.resolve(name, tied), dtype=torch.float32)
