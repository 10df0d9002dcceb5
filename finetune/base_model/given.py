"""What a run's configuration says of its base model that the files leave open."""

from __future__ import annotations

from checkpoint import Given
from finetune.config.model import ModelConfig


def given_of(model: ModelConfig) -> Given:
    """As ``checkpoint.open_checkpoint`` takes it."""
    return Given(
        config=model.config,
        neox_qkv_layout=model.neox_qkv_layout,
        master_weights=model.master_weights,
        layer_map=model.layer_map,
        adapter_config=model.adapter_config,
        prefix=model.weights_prefix,
    )
