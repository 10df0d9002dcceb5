"""What a run's configuration says of its base model that the files leave open."""

from __future__ import annotations

from pathlib import Path

from checkpoint import Given
from finetune.config.whole import TuneConfig


def given_of(config: TuneConfig) -> Given:
    """As ``checkpoint.open_checkpoint`` takes it; a ``tokenizer.path`` that is not there is told of where it is read."""
    model, tokenizer = config.model, config.tokenizer.path
    return Given(
        config=model.config,
        tokenizer=tokenizer if tokenizer is not None and Path(tokenizer).expanduser().exists() else None,
        neox_qkv_layout=model.neox_qkv_layout,
        master_weights=model.master_weights,
        layer_map=model.layer_map,
        adapter_config=model.adapter_config,
        prefix=model.weights_prefix,
    )
