"""A model that was trained, whole and ready to compute: a checkpoint, or an adapter joined with its base. No DeepSpeed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from checkpoint import Checkpoint, CheckpointError, open_checkpoint
from checkpoint.disk.folder import Folder
from checkpoint.given import NOTHING_GIVEN, Given
from checkpoint.text.tokenizer_files import TOKENIZER_FILES, check_tokenizer_files
from finetune.base_model.hub import folder_of
from finetune.data.tokenizer import usual_folder
from finetune.errors import ConfigError
from finetune.model.build import load_model
from finetune.output.folder import checkpoint_folder
from finetune.trained.merge import adapter_folder, open_joined


@dataclass(frozen=True, slots=True)
class Trained:
    """What inference needs of a checkpoint."""

    model: PreTrainedModel
    folder: Path
    """Where the checkpoint or adapter lies."""
    tokenizer_folder: Path
    generation_config: Mapping[str, Any]


def open_trained(path: Path, dtype: torch.dtype, given: Given = NOTHING_GIVEN) -> Trained:
    """Load the model of a checkpoint, a folder of checkpoints (the latest counts), a run's folder, or an adapter.

    Args:
        given: what the files leave open.

    Raises:
        ConfigError: the checkpoint, its tensors or its tokenizer is at fault.
    """
    path = folder_of(path, "checkpoint")
    adapter = adapter_folder(path) if given.adapter is None else None
    try:
        with _opened(path, adapter, given) as checkpoint:
            if adapter is None:  # else it was found by what it is known by
                checkpoint.check_base(given)
            folder = checkpoint.path if adapter is None else adapter
            model = load_model(checkpoint, dtype)
            nn.Module.eval(model)
            folders = [usual_folder(checkpoint.tokenizer, str(path))]
            if given.tokenizer is None:
                folders = [folder, checkpoint.path, *folders]
            places = [place for place in folders if (place / TOKENIZER_FILES[0]).is_file()]
            if not places:
                raise ConfigError(f"{folder}: holds no {TOKENIZER_FILES[0]}")
            check_tokenizer_files(Folder(places[0]))
            return Trained(model, folder, places[0], dict(checkpoint.generation_config))
    except CheckpointError as error:
        raise ConfigError(f"{path}: {error}") from error


def _opened(path: Path, adapter: Path | None, given: Given) -> Checkpoint:
    """The checkpoint at ``path``; of an adapter the model with it."""
    if adapter is not None:
        return open_joined(adapter, given, stacked=True)
    return open_checkpoint(checkpoint_folder(path), given=given, stacked=True)
