"""Small checkpoints for the tests of this folder: whole ones, and files made byte by byte to break one rule each."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from checkpoint import Checkpoint, CheckpointWriter, open_checkpoint

CONFIG: dict[str, Any] = {"model_type": "gpt2", "vocab_size": 11}
TOKENIZER = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 10, "content": "<end>"}]}


def some_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Tensors of several dtypes and shapes."""
    make = torch.Generator().manual_seed(seed)
    return {
        "transformer.wte.weight": torch.randn(11, 6, generator=make),
        "transformer.h.0.ln_1.bias": torch.randn(6, generator=make, dtype=torch.float64),
        "transformer.h.0.mlp.c_fc.weight": torch.randn(6, 8, generator=make).bfloat16(),
        "transformer.h.0.mlp.c_proj.weight": torch.randn(8, 6, generator=make).half(),
        "scale": torch.tensor(0.5),
    }


def write_config(folder: Path, config: object = CONFIG) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def plain_folder(folder: Path, tensors: dict[str, torch.Tensor] | None = None) -> Path:
    """A folder with one ``model.safetensors``, as transformers writes it."""
    write_config(folder)
    save_file(some_tensors() if tensors is None else tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def sharded_folder(folder: Path) -> Path:
    """A folder of two shards and an index, without a manifest."""
    write_config(folder)
    tensors = list(some_tensors().items())
    weight_map: dict[str, str] = {}
    for number, part in enumerate((tensors[:2], tensors[2:]), start=1):
        name = f"model-{number:05d}-of-00002.safetensors"
        save_file(dict(part), folder / name, metadata={"format": "pt"})
        weight_map |= {tensor: name for tensor, _ in part}
    write_index(folder, weight_map)
    return folder


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def read_index(folder: Path) -> dict[str, str]:
    return json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]


def written(root: Path, step: int = 1, *, seed: int = 0, **options: Any) -> Path:
    """A checkpoint of Tessera with several shards and a tokenizer."""
    root.parent.mkdir(parents=True, exist_ok=True)
    source = root.parent / "tokenizer.json"
    source.write_text(json.dumps(TOKENIZER))
    options = {
        "config": CONFIG,
        "tokenizer_files": [source],
        "max_shard_bytes": 300,
        "generation_config": {"eos_token_id": 10},
    } | options
    with CheckpointWriter(root, step=step, **options) as writer:
        for name, tensor in some_tensors(seed).items():
            writer.add(name, tensor)
    return root / f"step-{step:08d}"


def assert_holds(checkpoint: Checkpoint, tensors: dict[str, torch.Tensor]) -> None:
    """The checkpoint holds exactly these tensors, bit for bit."""
    assert checkpoint.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        stored = checkpoint.read(name)
        assert stored.dtype == tensor.dtype
        assert torch.equal(stored, tensor), name


def seed_of(path: Path, seeds: tuple[int, ...]) -> int:
    """Which of ``some_tensors(seed)`` a whole checkpoint holds."""
    with open_checkpoint(path, verify="sha256") as checkpoint:
        stored = checkpoint.read("transformer.wte.weight")
        seed = next(seed for seed in seeds if torch.equal(stored, some_tensors(seed)["transformer.wte.weight"]))
        assert_holds(checkpoint, some_tensors(seed))
        return seed


def raw_safetensors(path: Path, header: object, data: bytes = b"", *, length: int | None = None) -> None:
    """A file with this header, whatever it says; ``length`` overrides the header length that the file claims."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)


def flip_bit(path: Path, byte: int, bit: int) -> None:
    with open(path, "r+b") as file:
        (value,) = os.pread(file.fileno(), 1, byte)
        os.pwrite(file.fileno(), bytes([value ^ (1 << bit)]), byte)
