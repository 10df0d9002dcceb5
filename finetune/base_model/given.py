"""What a run's configuration says of its base model that the files leave open."""

from __future__ import annotations

from pathlib import Path

from checkpoint import Given
from finetune.config.whole import TuneConfig
from finetune.output.folder import CHECKPOINTS, RESUME


def given_of(config: TuneConfig) -> Given:
    """What the run's configuration says of its base, for ``checkpoint.open_checkpoint``.

    A ``tokenizer.path`` that is not there is left out here and told of where it is read. The run's own saves leave nothing open
    but the tokenizer: what was said of the base is not said of them, and may be gone.
    """
    model, tokenizer = config.model, config.tokenizer.path
    given_tokenizer = tokenizer if tokenizer is not None and Path(tokenizer).expanduser().exists() else None
    if _is_own_save(config):
        return Given(tokenizer=given_tokenizer)
    return Given(
        config=model.config,
        tokenizer=given_tokenizer,
        neox_qkv_layout=model.neox_qkv_layout,
        master_weights=model.master_weights,
        layer_map=model.layer_map,
        adapter_config=model.adapter_config,
        prefix=model.weights_prefix,
        base=model.base,
        adapter=model.adapter,
        any_base=model.base_changed == "accept",
    )


def _is_own_save(config: TuneConfig) -> bool:
    """Whether ``model.path`` is a save of the run itself, which then goes on without its base."""
    if config.model.path is None:
        return False
    root = Path(config.model.path).parent
    return root.name in (CHECKPOINTS, RESUME) and root.parent == Path(config.run.output).resolve()
