"""Writes the tables of ``docs/gpu.md``: which model trains and serves on which GPU beside how much host memory.

Training is what ``tessera-finetune plan`` forecasts, serving what the weights and a position of the KV cache take. ``make
gpu-fits`` runs it, which takes five minutes; ``--check`` proves that the committed tables are what the code says, and writes
nothing. ``tests/repo`` compares one row of each.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path
from typing import Any, Final

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = REPOSITORY / "docs/gpu.md"
sys.path.insert(0, str(REPOSITORY))  # the packages as they lie here, installed or not

from finetune.config import TuneConfig  # noqa: E402  # the path comes first
from finetune.config.load import load_config  # noqa: E402

GIB: Final = 1 << 30
GPUS: Final = {"24 GB": 23.5, "48 GB": 47.4, "80 GB": 79.1, "141 GB": 139.8}
"""GiB that such a device offers."""
HOSTS: Final = {"64 GB": 62.0, "128 GB": 126.0, "256 GB": 254.0, "512 GB": 510.0}
"""GiB of host memory that a run may take: 2 are left to the system."""

_NEOX: Final = {"model_type": "gpt_neox", "max_position_embeddings": 2048}
MODELS: Final[Mapping[str, dict[str, Any]]] = {
    "Pythia-410M": _NEOX | {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "vocab_size": 50304},
    "Pythia-1.4B": _NEOX | {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16, "vocab_size": 50304},
    "Pythia-2.8B": _NEOX | {"hidden_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 50304},
    "Pythia-6.9B": _NEOX | {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 50432},
    "Llama-3.1-8B": {
        "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192,
    },
    "Pythia-12B": _NEOX | {"hidden_size": 5120, "num_hidden_layers": 36, "num_attention_heads": 40, "vocab_size": 50688},
    "GPT-NeoX-20B": _NEOX | {"hidden_size": 6144, "num_hidden_layers": 44, "num_attention_heads": 64, "vocab_size": 50432},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Recipe:
    """One way to train on one GPU."""

    name: str
    tree: Mapping[str, Any]


RECIPES: Final = (
    Recipe("G", {"zero": {"stage": 1}}),
    Recipe("H", {"zero": {"stage": 3}, "offload": {"optimizer": "cpu"}}),
    Recipe("W", {"zero": {"stage": 3}, "offload": {"optimizer": "cpu", "parameters": "cpu"}}),
    Recipe("N", {"zero": {"stage": 3}, "offload": {"optimizer": "nvme", "parameters": "cpu", "path": "nvme"}}),
    Recipe("NW", {"zero": {"stage": 3}, "offload": {"optimizer": "nvme", "parameters": "nvme", "path": "nvme"}}),
)
"""The fastest first: each keeps less on the GPU, or in memory, than the one before. Twin-Flow comes between the first two."""
RATIOS: Final = tuple(step / 20 for step in range(1, 20))
"""Shares of the optimizer's state on the host that are tried for Twin-Flow (``offload.ratio``), the smallest first."""
LORA: Final = Recipe("yes", {"zero": {"stage": 1}, "lora": {"rank": 16}})


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes that a run takes at most."""

    device: int
    host: int


def main(arguments: list[str]) -> int:
    """Write all tables, or with ``--check`` compare them; 1 where one differs."""
    tables = {"training": training_table(), "lora": lora_table(), "serving": serving_table()}
    page = wanted = PAGE.read_text(encoding="utf-8")  # after these minutes, in which it may be edited
    for name, table in tables.items():
        wanted = with_table(wanted, name, table)
    if "--check" not in arguments:
        PAGE.write_text(wanted, encoding="utf-8")
    elif page != wanted:
        print("a table of docs/gpu.md is not what docs/gpu_fits.py makes; make gpu-fits writes it:", file=sys.stderr)
        sys.stderr.writelines(unified_diff(page.splitlines(keepends=True), wanted.splitlines(keepends=True), "is", "made"))
        return 1
    return 0


def with_table(page: str, name: str, table: str) -> str:
    """The page with another table of that name."""
    begin, end = f"<!-- {name}: docs/gpu_fits.py -->\n", f"<!-- end of {name} -->\n"
    head, _, rest = page.partition(begin)
    return head + begin + "\n" + table + "\n" + end + rest.partition(end)[2]


# -- training


def training_table() -> str:
    """Full fine-tuning: the fastest recipe that fits, for each size of host memory that changes it."""
    return _table(("model", *GPUS), [training_row(name) for name in MODELS])


def training_row(model: str) -> tuple[str, ...]:
    """One model's cells."""
    on_gpu, *others = [(recipe.name, needs(model, recipe)) for recipe in RECIPES]
    found = [on_gpu, *twin_flow(model, others[0][1]), *others]
    return model, *(_fastest(found, room) for room in GPUS.values())


def twin_flow(model: str, on_host: Needs) -> list[tuple[str, Needs]]:
    """What the optimizer's state in two parts takes, by the share on the host.

    Forecast for the smallest share; between that and all of it, which ``on_host`` has, what is taken follows the share. Where
    another phase of a run is the busiest in between, it takes less than so.
    """
    least = RATIOS[0]
    first = needs(model, Recipe("T", {"zero": {"stage": 3}, "offload": {"optimizer": "cpu", "ratio": least}}))

    def at(share: float, low: int, high: int) -> int:
        return round(low + (high - low) * (share - least) / (1.0 - least))

    return [
        (f"T {share:g}", Needs(at(share, first.device, on_host.device), at(share, first.host, on_host.host)))
        for share in RATIOS
    ]


def lora_table() -> str:
    """LoRA of rank 16 with the base in bf16 on the GPU: the least host memory, where it fits."""
    return _table(("model", *GPUS), [lora_row(name) for name in MODELS])


def lora_row(model: str) -> tuple[str, ...]:
    """One model's cells."""
    found = [(LORA.name, needs(model, LORA))]
    return model, *(_fastest(found, room) for room in GPUS.values())


def _fastest(found: list[tuple[str, Needs]], device_gib: float) -> str:
    cells: list[str] = []
    last = ""
    for host, room in HOSTS.items():
        fitting = [name for name, need in found if need.device <= device_gib * GIB and need.host <= room * GIB]
        if fitting and fitting[0] != last:
            last = fitting[0]
            cells.append(f"{host}: {last}")
    return ", ".join(cells) or "–"


def needs(model: str, recipe: Recipe) -> Needs:
    """What training takes by the forecast: bf16, one sequence of 2,048 tokens at a time, layers recomputed, AdamW."""
    from finetune.forecast.estimate import forecast, model_config_of
    from finetune.forecast.hardware import Hardware

    with tempfile.TemporaryDirectory() as name:
        config = _config(Path(name), model, recipe)
        room = Hardware(device="cuda", gpus=1, gpu_bytes=None, ram_bytes=1 << 60, disk_bytes=None, nvme_bytes=None)
        found = forecast(config, model_config_of(config, weights=False), room, precision="bf16")
    return Needs(found.device_bytes, found.host_bytes)


def _config(folder: Path, model: str, recipe: Recipe) -> TuneConfig:
    shape = MODELS[model]
    (folder / "model").mkdir()
    config = shape | {"intermediate_size": shape.get("intermediate_size", 4 * shape["hidden_size"])}
    (folder / "model/config.json").write_text(json.dumps(config))
    tree = {
        "model": {"path": str(folder / "model")},
        "data": {"train": ["text.jsonl"], "seq_len": 2048},
        "batch": {"micro": 1},
        "activations": {"checkpoint": "device"},
        "run": {"output": str(folder / "run"), "precision": "bf16", "device": "cuda"},
        **recipe.tree,
    }
    (folder / "run.json").write_text(json.dumps(tree))
    return load_config(folder / "run.json", [], command="tune")


# -- serving


def serving_table() -> str:
    """Weights, a position of the KV cache, and how many positions fit."""
    header = ("model", "weights: bf16, int8, int4", "a position in bf16", *(f"positions on {gpu}" for gpu in GPUS))
    return _table(header, [serving_row(name) for name in MODELS])


def serving_row(model: str) -> tuple[str, ...]:
    """One model's cells: positions with weights in bf16, int8 and int4; ``all`` that sequences can have."""
    import torch
    from torch import nn
    from transformers import AutoConfig

    from finetune.model.pretrained import new_model
    from serve.config import CacheConfig, SchedulerConfig
    from serve.worker.kv_cache import LIBRARIES_BYTES, block_bytes

    shape = MODELS[model]
    config = AutoConfig.for_model(**shape | {"intermediate_size": shape.get("intermediate_size", 4 * shape["hidden_size"])})
    with torch.device("meta"):
        built = new_model(config, torch.bfloat16)
    linear = [module.weight for module in built.modules() if isinstance(module, nn.Linear)]
    elements, outputs = sum(weight.numel() for weight in linear), sum(weight.shape[0] for weight in linear)
    rest = 2 * (sum(weight.numel() for weight in built.parameters()) - elements)
    weights = (rest + 2 * elements, rest + elements + 4 * outputs, rest + elements // 2 + 4 * elements // 32)
    heads = shape["num_attention_heads"]
    position = block_bytes(
        layers=shape["num_hidden_layers"],
        kv_heads=shape.get("num_key_value_heads", heads),
        head_dim=shape["hidden_size"] // heads,
        block_tokens=1,
        dtype=torch.bfloat16,
    )
    share, useful = CacheConfig().memory_fraction, SchedulerConfig().max_num_seqs * shape["max_position_embeddings"]
    cells = []
    for room in GPUS.values():
        fit = [(int(room * GIB * share) - LIBRARIES_BYTES - taken) // position for taken in weights]
        cells.append(", ".join("all" if each >= useful else f"{each // 1000:,}k" if each > 1000 else "–" for each in fit))
    return model, ", ".join(f"{taken / GIB:.1f}" for taken in weights) + " GiB", f"{position / 1024:.0f} KiB", *cells


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (header, ("---",) * len(header), *rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
