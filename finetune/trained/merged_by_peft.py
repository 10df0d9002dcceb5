"""Adapters that are more than sums with their base's weights, merged into the model by peft where it can."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from checkpoint import Checkpoint, CheckpointError
from checkpoint.disk.folder import Folder
from checkpoint.readers.lora_patterns import alpha_of, is_pattern
from finetune.errors import ConfigError
from finetune.machine.quiet import quiet
from finetune.model.build import load_model, stored_dtype, tied_names
from finetune.model.finite import check_finite, found_in

if TYPE_CHECKING:
    from peft import PeftModel

_ADAPTER = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_NO_SUMS = frozenset(
    ("PREFIX_TUNING", "PROMPT_TUNING", "P_TUNING", "MULTITASK_PROMPT_TUNING", "ADAPTION_PROMPT", "CPT", "XLORA", "POLY")
)


def merged_model(base: Checkpoint, folder: Path, dtype: torch.dtype | None) -> PreTrainedModel:
    """The base model with the adapter of ``folder`` in it.

    Args:
        dtype: of the model; unset: the base's own.

    Raises:
        CheckpointError: the base's tensors are not those of its config.json.
        ConfigError: the two do not fit, the adapter adapts one of two weights that the base ties, or a weight of either is not
            finite.
    """
    with quiet():
        from peft import PeftModel

        _refuse_unmergeable(folder)
        if not (folder / _WEIGHTS).is_file():
            raise ConfigError(f"{folder}: holds no {_WEIGHTS}; of peft's other files such adapters are not merged")
        model = load_model(base, dtype or stored_dtype(base))
        tied = tied_names(model)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message="Found missing adapter keys")
                wrapped = PeftModel.from_pretrained(model, str(folder), autocast_adapter_dtype=True)
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError, UserWarning) as error:
            reason = " ".join(str(error).split())[:300]
            raise ConfigError(f"{folder}: does not fit the base model {base.path}: {reason}") from error
        _refuse_patterns(wrapped, folder)
        _refuse_tied(wrapped, tied, folder)
        with found_in(str(folder)):
            for name, parameter in wrapped.named_parameters():
                if "lora_" in name:
                    check_finite(name, parameter)
        merged: PreTrainedModel = wrapped.merge_and_unload()
    with found_in(f"{base.path} with the adapter {folder}"):
        for name, parameter in merged.named_parameters():
            check_finite(name, parameter)
    return merged


def _refuse_tied(wrapped: PeftModel, tied: Mapping[str, str], folder: Path) -> None:
    """Refuse an adapted module whose weight is another's too: peft computes with the two apart and merges into both.

    Args:
        tied: alias to owner, of the base model.
    """
    shared = {name.removesuffix(".weight") for pair in tied.items() for name in pair}
    for name, module in wrapped.get_base_model().named_modules():
        if name in shared and type(module).__module__.startswith("peft."):
            rule = f"adapts {name!r}, which the base model ties: embedding and head are one there, with the adapter two"
            raise ConfigError(f"{folder}: {rule}")


def _refuse_unmergeable(folder: Path) -> None:
    """Refuse an adapter that is no sum with the base's weights, or whose model has layers that the base has not."""
    described = Folder(folder).read_object(_ADAPTER)
    if described.get("peft_type") in _NO_SUMS:
        raise ConfigError(
            f"{folder / _ADAPTER}: peft_type is {described['peft_type']}; peft merges no such adapter with its base"
        )
    begun = described.get("init_lora_weights")
    if isinstance(begun, str) and begun.startswith("pissa_niter_"):
        rule = f"init_lora_weights is {begun!r}, by which peft changes the base by chance, differently each time"
        raise ConfigError(f"{folder / _ADAPTER}: {rule}; save it converted to plain LoRA")
    for key in ("layer_replication", "alora_invocation_tokens"):
        if described.get(key):
            raise ConfigError(f"{folder / _ADAPTER}: {key} is set; such an adapter is not merged")


def _refuse_patterns(wrapped: PeftModel, folder: Path) -> None:
    """Refuse an adapter with a layer to which today's peft gives another alpha than the release that trained it did."""
    described = Folder(folder).read_object(_ADAPTER)
    patterns = [key for table in ("rank_pattern", "alpha_pattern") for key in described.get(table) or ()]
    if described.get("peft_type") != "LORA" or not patterns or not all(map(is_pattern, patterns)):
        return
    for name, module in wrapped.get_base_model().named_modules():
        alphas = getattr(module, "lora_alpha", None)
        for adapter, given in alphas.items() if isinstance(alphas, dict) else ():
            try:
                trained = alpha_of(described, name, module.r[adapter], _ADAPTER)
            except CheckpointError as error:
                raise ConfigError(f"{folder}: {error}") from error
            if trained != given:
                rule = f"gives {name!r} the alpha {trained} by the peft that trained it, and {given} by today's"
                raise ConfigError(f"{folder / _ADAPTER}: {rule}; such an adapter is not merged")
