"""The least memory a run can need, by the sizes of its model alone: refuses what is far too large before anything is imported.

Counts matrices only, and of the optimizer only what is kept between steps; the forecast that follows counts everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from checkpoint import CheckpointError
from checkpoint.opening.prove import model_config
from finetune.base_model.given import given_of
from finetune.config import TuneConfig
from finetune.errors import ConfigError
from finetune.forecast.hardware import this_machine
from finetune.machine import inventory
from finetune.output.folder import checkpoint_folder
from finetune.units import in_gib

_GATED: Final = ("llama", "mistral", "qwen2")
"""Families whose feed-forward layers have three matrices, the others have two."""
_GROUPED: Final = (*_GATED, "phi")
"""Those that may have fewer keys and values than queries."""
_FOUR_TIMES: Final = ("gpt2", "gptj", "gpt_neo")
"""Those whose feed-forward layers are four times as wide as the model unless they say."""
_FAMILIES: Final = (*_GROUPED, *_FOUR_TIMES, "gpt_neox", "opt")
_STATE_BYTES: Final = {"adamw": 8, "zenflow": 8, "lion": 4, "muon": 4, "adafactor": 0}
"""Bytes of state for a trained element at least, between steps, beside the fp32 weight; 0 of an optimizer without a row.

Copied from what ``KINDS`` of ``finetune.optimizers.kinds`` declares, which imports torch; a test holds it to that.
"""

REMEDY: Final = "`tessera-finetune plan` with the same file and options says what to change; --anyway starts it all the same"


def check_least(config: TuneConfig) -> None:
    """Refuse a run whose model alone is larger than all memory of this machine.

    Raises:
        ConfigError: says what it needs at least, and what there is.
    """
    elements = least_elements(_sizes(config))
    hardware = this_machine(config)
    fp32 = config.run.precision == "fp32" or (config.run.precision == "auto" and hardware.device == "cpu")
    each = (4 if fp32 else 2) if config.lora is not None else 4 + _STATE_BYTES.get(config.algorithm, 0)
    places, room = ["host memory"], hardware.ram_bytes
    if hardware.device == "cuda":
        if hardware.gpu_bytes is None:  # nothing is refused for want of what is not known
            return
        places, room = [*places, "device memory"], room + sum(size or 0 for size in inventory.gpu_memory_bytes())
    if config.offload.on_disk and hardware.nvme_bytes is not None:
        places, room = [*places, "NVMe space"], room + hardware.nvme_bytes
    if elements * each > room:
        what = f"needs {in_gib(elements * each)} GiB or more of {in_gib(room)} GiB"
        why = f"for at least {elements / 1e9:.1f} billion weights"
        raise ConfigError(f"the run does not fit this machine: {' and '.join(places)}: {what} {why}. {REMEDY}")


def _sizes(config: TuneConfig) -> Mapping[str, Any]:
    """``model.new``, or ``config.json`` of what ``model.path`` means; empty where it cannot be read, which is told later."""
    if config.model.path is None:
        return config.model.new or {}
    try:
        return model_config(checkpoint_folder(Path(config.model.path).expanduser()), given_of(config))[0]
    except CheckpointError:
        return {}


def least_elements(sizes: Mapping[str, Any]) -> int:
    """Elements of the matrices of a model, or fewer; 0 for a family or sizes that are not known here."""

    def size(*names: str) -> int:
        """The first that is given; transformers knows several names for one."""
        found = next((sizes[name] for name in names if sizes.get(name) is not None), 0)
        return found if isinstance(found, int) and found > 0 else 0

    family = sizes.get("model_type")
    if family not in _FAMILIES:
        return 0
    hidden, layers = size("hidden_size", "n_embd"), size("num_hidden_layers", "n_layer", "num_layers")
    inner = size("intermediate_size", "n_inner", "ffn_dim") or (4 * hidden if family in _FOUR_TIMES else 0)
    heads = size("num_attention_heads", "n_head", "num_heads")
    width = heads * size("head_dim") or hidden
    layer = (2 if family in _GROUPED else 4) * hidden * width + (3 if family in _GATED else 2) * hidden * inner
    return layers * layer + (size("word_embed_proj_dim") or hidden) * size("vocab_size")
