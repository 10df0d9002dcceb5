"""LoRA and its kin through peft: put beside a model, and named as peft names them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from finetune.config import LoraConfig
from finetune.errors import ConfigError

if TYPE_CHECKING:
    from peft import PeftModel


def add_adapters(model: PreTrainedModel, config: LoraConfig, *, base: str, seed: int) -> nn.Module:
    """Freeze a filled model and put adapters beside its linear layers; returns peft's model around it.

    A new adapter changes nothing: one of its factors is zero. Equal for equal seeds.

    Raises:
        ConfigError: ``lora.targets`` names no linear layer.
    """
    from peft import LoraConfig as PeftLora
    from peft import get_peft_model

    found = _linear_layers(model)
    for target in config.targets:
        if not any(name == target or name.endswith(f".{target}") for name in found):
            ends = ", ".join(sorted({name.rsplit(".", 1)[-1] for name in found}))
            raise ConfigError(f"lora.targets: {target!r} ends the name of no linear layer of the model; there are {ends}")
    settings = PeftLora(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # annotated int; any number to peft
        lora_dropout=config.dropout,
        target_modules=list(config.targets) or "all-linear",
        use_rslora=config.method == "rslora",
        use_dora=config.method == "dora",
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(seed)
    # DeepSpeed converts the adapters with the rest; peft's own fp32 copies would be converted back.
    wrapped = get_peft_model(model, settings, autocast_adapter_dtype=False)
    wrapped.peft_config["default"].base_model_name_or_path = base  # peft takes it from the model, built from no folder
    return wrapped


def _linear_layers(model: PreTrainedModel) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)]


def base_of(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside peft's, or the model itself."""
    get = getattr(model, "get_base_model", None)
    return cast(PreTrainedModel, model if get is None else get())


def as_peft_names_them(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of ``named_parameters`` under the names of ``adapter_model.safetensors``."""
    from peft import get_peft_model_state_dict

    found: dict[str, torch.Tensor] = get_peft_model_state_dict(model, state_dict=dict(tensors), save_embedding_layers=False)
    assert len(found) == len(tensors), "peft left a trained tensor out of the adapter"
    return found


def adapter_config_of(model: nn.Module) -> dict[str, Any]:
    """``adapter_config.json``: peft's description of the adapters, ready for inference."""
    values: dict[str, Any] = cast("PeftModel", model).peft_config["default"].to_dict()
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in values.items()}
    for key in ("task_type", "peft_type"):
        plain[key] = str(getattr(plain[key], "value", plain[key]))
    return {**plain, "inference_mode": True}
