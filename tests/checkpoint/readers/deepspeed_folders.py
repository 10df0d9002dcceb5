"""Folders as DeepSpeed's engines save them, written from their description, without DeepSpeed: small, quick, easy to break."""

from __future__ import annotations

import json
import math
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

TAG = "global_step7"
CONFIG = {"model_type": "gpt2", "vocab_size": 11}
GROUPS: tuple[tuple[str, ...], ...] = (("wte.weight", "mlp.weight"), ("ln.bias", "scale", "attn.weight"))
"""Names of the trained tensors, by sub-group."""
FROZEN = ("frozen.weight",)
ALIASES = {"head.weight": "wte.weight"}


def tensors() -> dict[str, torch.Tensor]:
    make = torch.Generator().manual_seed(0)
    shapes = {"wte.weight": (11, 6), "mlp.weight": (5, 7), "ln.bias": (3,), "scale": (1,), "attn.weight": (2, 3, 5)}
    found = {name: torch.randn(shape, generator=make) for name, shape in shapes.items()}
    return found | {"frozen.weight": torch.randn(9, 5, generator=make).bfloat16()}


class LossScaler:
    """Pickles as DeepSpeed's does."""

    def __init__(self) -> None:
        self.cur_scale = 1.0


@contextmanager
def deepspeed_classes() -> Iterator[None]:
    """``LossScaler`` pickles under DeepSpeed's name for it, which is not imported."""
    words = ["deepspeed", "runtime", "fp16", "loss_scaler"]
    names = [".".join(words[: number + 1]) for number in range(len(words))]
    before = {name: sys.modules.get(name) for name in names}
    made = {name: ModuleType(name) for name in names}
    for outer, inner, word in zip(names, names[1:], words[1:], strict=False):
        setattr(made[outer], word, made[inner])
    made[names[-1]].LossScaler = LossScaler  # type: ignore[attr-defined]  # a module made here
    LossScaler.__module__ = names[-1]
    sys.modules.update(made)
    try:
        yield
    finally:
        LossScaler.__module__ = __name__
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def part(tensor: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """The elements of ``rank``, with padding."""
    count = math.ceil(tensor.numel() / world)
    padded = torch.zeros(count * world, dtype=tensor.dtype)
    padded[: tensor.numel()] = tensor.flatten()
    return padded[rank * count : (rank + 1) * count].clone()


def model_file(folder: Path, rank: int) -> Path:
    return folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"


def optimizer_file(folder: Path, rank: int, prefix: str = "bf16_") -> Path:
    return folder / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def zero3(root: Path, world: int = 4, **model: Any) -> Path:
    """A root of saves with one of ``world`` ranks; ``model`` lies over what the model files hold. Returns the save's folder."""
    folder = root / TAG
    folder.mkdir(parents=True)
    (root / "config.json").write_text(json.dumps(CONFIG))
    (root / "latest").write_text(TAG)
    values = tensors()
    for rank in range(world):
        tree = {
            "module": OrderedDict({name: torch.empty(0) for name in [*values, *ALIASES]} | {"mask": torch.ones(2, 2)}),
            "buffer_names": ["mask"],
            "param_shapes": [OrderedDict((name, values[name].shape) for name in group) for group in GROUPS],
            "frozen_param_shapes": OrderedDict((name, values[name].shape) for name in FROZEN),
            "frozen_param_fragments": OrderedDict((name, part(values[name], rank, world)) for name in FROZEN),
            "shared_params": ALIASES if rank == 0 else {},
            "global_steps": 7,
            "ds_version": "0.19.8",
        }
        torch.save(tree | model, model_file(folder, rank))
        flat = [torch.cat([part(values[name], rank, world) for name in group]) for group in GROUPS]
        save_optimizer(optimizer_file(folder, rank), {"fp32_flat_groups": flat, "zero_stage": 3, "partition_count": world})
    return folder


def save_optimizer(path: Path, state: Mapping[str, Any]) -> None:
    with deepspeed_classes():
        moments = {"state": {0: {"exp_avg": torch.zeros(8)}}}
        torch.save({"optimizer_state_dict": {"loss_scaler": LossScaler(), "optimizer_state_dict": moments, **state}}, path)


def change(path: Path, **values: Any) -> None:
    """Give a saved file other values at its top level, or at that of its optimizer's state."""
    with deepspeed_classes():
        tree = torch.load(path, weights_only=False)
        place = tree.get("optimizer_state_dict", tree)
        place.update(values)
        torch.save(tree, path)


def zero1(root: Path, world: int = 3) -> Path:
    """A save of ZeRO-1: the module in bfloat16, masters in fp32."""
    folder = root / TAG
    folder.mkdir(parents=True)
    (root / "config.json").write_text(json.dumps(CONFIG))
    (root / "latest").write_text(TAG)
    values = {name: tensor.bfloat16() for name, tensor in tensors().items()}
    tree = {
        "module": OrderedDict(values | {alias: values[owner] for alias, owner in ALIASES.items()}),
        "param_shapes": [OrderedDict((name, values[name].shape) for name in group) for group in GROUPS],
        "global_steps": 7,
        "dp_world_size": world,
    }
    torch.save(tree, folder / "mp_rank_00_model_states.pt")
    flats = [torch.cat([tensors()[name].flatten() for name in group]) for group in GROUPS]
    for rank in range(world):
        state = {"single_partition_of_fp32_groups": [part(flat, rank, world) for flat in flats], "partition_count": [world] * 2}
        save_optimizer(optimizer_file(folder, rank), state)
    return folder


def zero3_of(root: Path, values: Mapping[str, torch.Tensor], world: int) -> Path:
    """A save of these tensors alone, all trained, by ``world`` ranks. Returns the save's folder."""
    folder = root / TAG
    folder.mkdir(parents=True)
    (root / "config.json").write_text(json.dumps(CONFIG))
    (root / "latest").write_text(TAG)
    for rank in range(world):
        tree = {
            "module": OrderedDict({name: torch.empty(0) for name in values}),
            "param_shapes": [OrderedDict((name, tensor.shape) for name, tensor in values.items())],
        }
        torch.save(tree, model_file(folder, rank))
        flat = [torch.cat([part(tensor, rank, world) for tensor in values.values()])]
        save_optimizer(optimizer_file(folder, rank), {"fp32_flat_groups": flat, "zero_stage": 3, "partition_count": world})
    return folder


def layer_files(root: Path, layers: dict[int, dict[str, torch.Tensor]], axis: str = "") -> Path:
    folder = root / TAG
    folder.mkdir(parents=True)
    (root / "config.json").write_text(json.dumps(CONFIG))
    (root / "latest").write_text(TAG)
    for number, table in layers.items():
        torch.save(table, folder / f"layer_{number:02d}{axis}-model_states.pt")
    return folder


def gpt2_layers() -> dict[int, dict[str, torch.Tensor]]:
    block = {"attn.c_attn.weight": torch.ones(2, 6), "ln_1.weight": torch.ones(2)}
    return {
        0: {"wpe.weight": torch.full((4, 2), 4.0), "wte.weight": torch.full((5, 2), 5.0)},
        2: {f"inner.{name}": tensor * 2 for name, tensor in block.items()},
        3: {f"inner.{name}": tensor * 3 for name, tensor in block.items()},
        5: {"weight": torch.full((2,), 6.0), "bias": torch.full((2,), 7.0)},
        6: {"weight": torch.full((5, 2), 8.0)},
    }
