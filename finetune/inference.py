"""A model that was trained, whole and ready to compute: a checkpoint, or an adapter joined with its base. No DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from checkpoint import Checkpoint, CheckpointError, open_checkpoint
from finetune.adapters import adapter_folder, merged_model, open_base
from finetune.data.tokenizer import TOKENIZER_FILES
from finetune.errors import ConfigError
from finetune.finite import found_in
from finetune.folders import checkpoint_folder
from finetune.model import build_empty, config_of, fill, shapes_of, tied_names


@dataclass(frozen=True, slots=True)
class Trained:
    """What inference needs of a checkpoint."""

    model: PreTrainedModel
    folder: Path
    """Of the checkpoint or adapter."""
    tokenizer_folder: Path
    generation_config: Mapping[str, Any]


def open_trained(path: Path, dtype: torch.dtype) -> Trained:
    """Load the model of a checkpoint, a folder of checkpoints (the latest counts), a run's folder, or an adapter.

    Raises:
        ConfigError: the checkpoint, its tensors or its tokenizer is at fault.
    """
    adapter = adapter_folder(path)
    try:
        with open_checkpoint(checkpoint_folder(path)) if adapter is None else open_base(adapter) as checkpoint:
            folder = checkpoint.path if adapter is None else adapter
            model = load_model(checkpoint, dtype) if adapter is None else merged_model(checkpoint.path, adapter, dtype).eval()
            places = [place for place in (folder, checkpoint.path) if (place / TOKENIZER_FILES[0]).is_file()]
            if not places:
                raise ConfigError(f"{folder}: holds no {TOKENIZER_FILES[0]}")
            return Trained(model, folder, places[0], dict(checkpoint.generation_config))
    except CheckpointError as error:
        raise ConfigError(f"{path}: {error}") from error


def load_model(checkpoint: Checkpoint, dtype: torch.dtype) -> PreTrainedModel:
    """The whole model of a checkpoint, filled tensor by tensor.

    Raises:
        CheckpointError: the tensors are not those of config.json.
        WeightNotFinite: one is not finite in ``dtype``.
    """
    model = build_empty(config_of(checkpoint), dtype, nullcontext())
    tied = tied_names(model)
    checkpoint.check_tensors(shapes_of(model), tied=tied)
    with found_in(str(checkpoint.path)):
        fill(model, lambda name: checkpoint.read(checkpoint.resolve(name, tied)), _always)
    return model.eval()


@contextmanager
def _always(parameters: list[nn.Parameter]) -> Iterator[bool]:
    yield True
