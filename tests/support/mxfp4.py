"""GPT-OSS as it is released: experts in numbers of four bits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

_STACKS = ("experts.gate_up_proj", "experts.down_proj")


def in_four_bits(folder: Path, decoded: Path) -> Path:
    """Give a saved GPT-OSS experts of MXFP4, drawn with a seed; returns ``decoded``, where they are what transformers makes
    of them."""
    shutil.copytree(folder, decoded, dirs_exist_ok=True)
    stored = load_file(folder / "model.safetensors")
    plain = dict(stored)
    draw = torch.Generator().manual_seed(3)
    for name in [name for name in stored if name.endswith(_STACKS)]:
        experts, inputs, outputs = stored.pop(name).shape
        codes = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8, generator=draw)
        scales = torch.randint(121, 125, (experts, outputs, inputs // 32), dtype=torch.uint8, generator=draw)
        stored |= {f"{name}_blocks": codes, f"{name}_scales": scales}
        plain[name] = convert_moe_packed_tensors(codes, scales)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(plain, decoded / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return decoded
