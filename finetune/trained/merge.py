"""``tessera-finetune merge``: an adapter joined with its base model, as a whole model again."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from checkpoint import Checkpoint, CheckpointError, open_checkpoint
from checkpoint.disk.folder import Folder
from checkpoint.readers.hub import could_be_on_hub, find_on_hub
from checkpoint.readers.lora_patterns import is_pattern, of_module
from finetune.base_model.hub import folder_of
from finetune.base_model.identity import candidates, find_again, recorded_beside
from finetune.data.tokenizer import usual_folder
from finetune.errors import ConfigError
from finetune.machine.quiet import quiet
from finetune.model.build import load_model, saved_config, stored_dtype, tied_names
from finetune.model.finite import check_finite, found_in
from finetune.output.folder import checkpoint_folder
from finetune.output.new_checkpoint import require_new, write_new
from finetune.output.saves import newest_first
from finetune.trained.export import tokenizer_files_of

if TYPE_CHECKING:
    from peft import PeftModel

_log = logging.getLogger(__name__)
_ADAPTER = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_NO_SUMS = frozenset(
    ("PREFIX_TUNING", "PROMPT_TUNING", "P_TUNING", "MULTITASK_PROMPT_TUNING", "ADAPTION_PROMPT", "CPT", "XLORA", "POLY")
)
_EXPORT = "is joined by `tessera-finetune export --from`, which keeps what peft computes"


def merge(
    adapter: Path,
    out: Path,
    *,
    base: Path | None = None,
    any_base: bool = False,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 2 << 30,
) -> Path:
    """Join an adapter with its base model into the new checkpoint ``out``; whole or absent.

    The whole model is in memory, in the base's type, and is merged by peft; each merged weight is computed in fp32.

    Args:
        adapter: a run's folder, a folder of checkpoints, or one folder with ``adapter_config.json``.
        base: the base model's folder; unset: the one that ``adapter_config.json`` names.
        any_base: join with that one even if the adapter was trained beside another.

    Raises:
        ConfigError: there is no adapter or no base, they do not fit, or ``out`` exists.
        RunError: writing failed.
    """
    out = require_new(out)
    folder = adapter_folder(adapter)
    if folder is None:
        raise ConfigError(f"{adapter}: holds no {_ADAPTER}; it is not an adapter")
    with open_base(folder, base, any_base=any_base) as checkpoint:
        try:
            model = merged_model(checkpoint, folder, dtype)
        except CheckpointError as error:
            raise ConfigError(f"{checkpoint.path}: {error}") from error
        source = folder if (folder / "tokenizer.json").is_file() else usual_folder(checkpoint.tokenizer, str(checkpoint.path))
        tied = tied_names(model)
        return write_new(
            out,
            ((name, parameter.detach()) for name, parameter in model.named_parameters() if name not in tied),
            step=checkpoint.step or 0,
            config=saved_config(model.config, model.dtype),
            generation_config=dict(checkpoint.generation_config) or None,
            tokenizer_files=tokenizer_files_of(source),
            max_shard_bytes=max_shard_bytes,
        )


def adapter_folder(path: Path) -> Path | None:
    """The adapter that counts of a run or of a folder of checkpoints, or ``path`` itself; ``None`` if that is no adapter.

    As of whole models, that is the one that ``latest`` names or, if it is not whole, the newest that is. Where none is whole,
    it is the first that would count, for what opens it to say what is wrong with it.
    """
    folder = checkpoint_folder(path)
    if not (folder / _ADAPTER).is_file():
        folder = next(iter(newest_first(folder)), folder)
    return folder if (folder / _ADAPTER).is_file() else None


def open_base(folder: Path, base: Path | None = None, *, any_base: bool = False) -> Checkpoint:
    """The base model of the adapter in ``folder``: at ``base``, or where the adapter says.

    Of a root above several checkpoints it is the one that the adapter was trained beside, known by its hash. Adapters of
    releases that recorded none get what the place means today, with a warning.

    Args:
        any_base: take what the place means today, whatever the adapter was trained beside.

    Raises:
        ConfigError: the adapter's format is another one, there is no such model, or it is another one.
    """
    if not (folder / _WEIGHTS).is_file():
        raise ConfigError(f"{folder}: holds no {_WEIGHTS}; adapters of other formats are not opened")
    from peft import PeftConfig

    try:
        described = PeftConfig.from_pretrained(str(folder))
    except Exception as error:
        raise ConfigError(f"{folder / _ADAPTER}: {' '.join(str(error).split())}") from error
    named = folder / _ADAPTER if base is None else "--base"
    base = folder_of(base or _in_cache(str(described.base_model_name_or_path)), f"{named}: base model")
    try:
        wanted = None if any_base else recorded_beside(folder)
    except CheckpointError as error:
        raise ConfigError(f"{folder}: {error}") from error
    try:
        places = candidates(base)
        found = places[0] if wanted is None else find_again(wanted, places)
        if found is None:
            remedy = "merge it with the place of that one as --base, or with --base-changed accept"
            raise ConfigError(f"{base}: is not the model that {folder} was trained beside, {wanted}; {remedy}")
        opened = open_checkpoint(found)
    except CheckpointError as error:
        raise ConfigError(f"{base}: {error}; name the base model with --base") from error
    if wanted is None and not any_base:
        _log.warning("%s does not say what its base model held; %s is taken for it, unproved", folder, opened.path)
    return opened


def _in_cache(name: str) -> str:
    """A base model that is named as one of the hub, where the hub's cache has it; else the name."""
    if Path(name).expanduser().exists() or not could_be_on_hub(name):
        return name
    try:
        return str(find_on_hub(name, fetch=False))
    except CheckpointError:
        return name  # of which the way to it is told


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
        model = load_model(base, dtype or stored_dtype(base))
        tied = tied_names(model)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message="Found missing adapter keys")
                wrapped = PeftModel.from_pretrained(model, str(folder), autocast_adapter_dtype=True)
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError, UserWarning) as error:
            reason = " ".join(str(error).split())[:300]
            resized = f"; one of a resized vocabulary {_EXPORT}" if "size mismatch" in reason else ""
            raise ConfigError(f"{folder}: does not fit the base model {base.path}: {reason}{resized}") from error
        _scale_as_trained(wrapped, folder)
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
            raise ConfigError(f"{folder}: {rule}; it {_EXPORT}")


def _refuse_unmergeable(folder: Path) -> None:
    """Refuse an adapter that is no sum with the base's weights, or whose model has layers that the base has not."""
    described = Folder(folder).read_object(_ADAPTER)
    if described.get("peft_type") in _NO_SUMS:
        raise ConfigError(
            f"{folder / _ADAPTER}: peft_type is {described['peft_type']}; peft merges no such adapter with its base"
        )
    for key in ("layer_replication", "alora_invocation_tokens"):
        if described.get(key):
            raise ConfigError(f"{folder / _ADAPTER}: {key} is set; such an adapter is not merged")


def _scale_as_trained(wrapped: PeftModel, folder: Path) -> None:
    """Give each layer the alpha that the release of peft that trained the adapter gave it; today's reads patterns otherwise."""
    described = Folder(folder).read_object(_ADAPTER)
    patterns = [key for table in ("rank_pattern", "alpha_pattern") for key in described.get(table) or ()]
    if described.get("peft_type") != "LORA" or not patterns or not all(map(is_pattern, patterns)):
        return
    for name, module in wrapped.get_base_model().named_modules():
        alphas, scales = getattr(module, "lora_alpha", None), getattr(module, "scaling", None)
        if isinstance(alphas, dict) and isinstance(scales, dict):
            _, alpha = of_module(described, name, _ADAPTER)
            for adapter in alphas.keys() & scales.keys():
                if alpha != alphas[adapter]:
                    scales[adapter] *= alpha / alphas[adapter]
