"""The checkpoint that ``model.path`` means, open, as far as a run may begin with it."""

from __future__ import annotations

from pathlib import Path

from checkpoint import Checkpoint, CheckpointError, open_checkpoint
from checkpoint.readers import peft
from finetune.base_model.given import given_of
from finetune.base_model.identity import candidates
from finetune.config import TuneConfig

_NO_BASE = (
    "is no base for another adapter (lora), which names one model that is whole; write both as one with "
    "`tessera-finetune export --from`, and train on that"
)


def open_base_model(config: TuneConfig) -> Checkpoint:
    """Open the checkpoint of ``model.path``, which must be set, with all that the configuration says of it.

    Raises:
        CheckpointError: there is none, it is not sound, it is an adapter and ``lora`` is set, or an adapter's base is another
            than it was trained beside.
    """
    assert config.model.path is not None
    given = given_of(config)
    checkpoint = open_checkpoint(candidates(Path(config.model.path))[0], given=given, stacked=True)
    try:
        has_adapter = checkpoint.is_adapted or any(info.adapted for info in checkpoint.tensors.values())
        if config.lora is not None and has_adapter:
            raise CheckpointError(peft.CONFIG, _NO_BASE)
        checkpoint.check_base(given)
    except BaseException:
        checkpoint.close()
        raise
    return checkpoint
