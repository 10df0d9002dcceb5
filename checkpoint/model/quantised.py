"""Recognises quantised weights, by what ``config.json`` says and by the tensors themselves, so that they are refused by name.

Some configurations are silent about it, and a folder whose scales are left aside would be read as a model of nonsense.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from checkpoint.disk.folder import Folder
from checkpoint.errors import CheckpointError

_SAID_BY = ("quantization_config", "compression_config")
_SIDECARS = {"quantize_config.json": "AutoGPTQ", "quant_config.json": "AutoAWQ", "hf_quant_config.json": "ModelOpt"}

_BY_ENDS: Mapping[str, str] = {
    ".g_idx": "GPTQ",
    ".qzeros": "GPTQ or AWQ",
    ".qweight": "GPTQ or AWQ",
    ".quant_state.bitsandbytes__nf4": "bitsandbytes in 4 bits",
    ".quant_state.bitsandbytes__fp4": "bitsandbytes in 4 bits",
    ".absmax": "bitsandbytes in 4 bits",
    ".SCB": "bitsandbytes in 8 bits",
    ".weight_packed": "compressed-tensors",
    ".weight_scale_inv": "FP8 by blocks",
    ".weight_scale": "FP8 or compressed-tensors",
    ".input_scale": "FP8 or compressed-tensors",
    "_blocks": "MXFP4",
    ".W_q": "HQQ",
    ".codebooks": "AQLM",
    ".trellis": "EXL3",
    ".q_weight": "EXL2",
}
"""Ends of names of tensors that only quantised weights have, the more telling first."""

_BITS = ("load_in_4bit", "load_in_8bit")


def method_said(config: Mapping[str, Any]) -> str | None:
    """What ``config.json`` says the weights are quantised by, such as ``gptq``; ``None`` where it says nothing."""
    inner = config.get("text_config")
    for part in (config, inner if isinstance(inner, dict) else {}):
        for key in _SAID_BY:
            value = part.get(key)
            if value is None:
                continue
            method = value.get("quant_method") if isinstance(value, dict) else None
            if isinstance(value, dict) and method is None and any(value.get(bits) for bits in _BITS):
                method = "bitsandbytes"
            return str(method or f"{key} without quant_method")[:80]
    return None


def check_not_quantised(names: Collection[str], folder: Folder, table: str) -> None:
    """Refuse tensors that quantised weights are made of.

    Raises:
        CheckpointError: names one of them, and what they are of.
    """
    for end, method in _BY_ENDS.items():
        found = next((name for name in names if name.endswith(end)), None)
        if found is None:
            continue
        said = next((tool for file, tool in _SIDECARS.items() if folder.has(file)), None)
        by = f"{method} ({said})" if said else method
        rule = f"holds tensor {found!r}, which is of weights quantised by {by}; quantised weights are not supported"
        raise CheckpointError(table, f"{rule}: use the model they were made from")
