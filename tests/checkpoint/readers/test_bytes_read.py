"""By the kernel's own count, opening a checkpoint and reading a rank's half of it takes little more than that half's bytes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from transformers import PreTrainedModel

from checkpoint import open_checkpoint
from tests.checkpoint.readers.deepspeed_folders import layer_files, zero3_of
from tests.support.megatron import Form, save_megatron, save_megatron_deepspeed
from tests.support.megatron_dist import save_torch_dist
from tests.support.models import build
from tests.support.neox import Form as NeoxForm
from tests.support.neox import save_neox

RANKS = 4
"""That save; two read."""


def hugging_face(folder: Path, model: PreTrainedModel) -> None:
    model.save_pretrained(folder, max_shard_size="2MB")


def pickled(folder: Path, model: PreTrainedModel) -> None:
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")


def zero3(folder: Path, model: PreTrainedModel) -> None:
    zero3_of(folder, model.state_dict(), RANKS)


def pipeline(folder: Path, model: PreTrainedModel) -> None:
    state = model.state_dict()
    blocks = [f"gpt_neox.layers.{number}." for number in range(model.config.num_hidden_layers)]
    starts = ["gpt_neox.embed_in.", *blocks, "gpt_neox.final_layer_norm.", "lm_head."]
    layer_files(
        folder,
        {
            number: {name.removeprefix(start): value.clone() for name, value in state.items() if name.startswith(start)}
            for number, start in enumerate(starts)
        },
    )
    model.config.save_pretrained(folder)


def distributed(folder: Path, model: PreTrainedModel) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # without ranks it warns that there are none
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder, no_dist=True)
    model.config.save_pretrained(folder)


LAYOUTS: dict[str, Callable[[Path, PreTrainedModel], object]] = {
    "Hugging Face": hugging_face,
    "Hugging Face, .bin": pickled,
    "ZeRO-3": zero3,
    "pipeline": pipeline,
    "torch.distributed.checkpoint": distributed,
    "GPT-NeoX": lambda folder, model: save_neox(folder, model, NeoxForm(model_parallel=RANKS)),
    "GPT-NeoX, no pipeline": lambda folder, model: save_neox(folder, model, NeoxForm(model_parallel=RANKS, pipeline=False)),
    "Megatron-LM": lambda folder, model: save_megatron(folder, model, Form(tensor=RANKS, names="fused")),
    "Megatron-LM torch_dist": lambda folder, model: save_torch_dist(folder, model, Form(tensor=RANKS, names="fused")),
    "Megatron-DeepSpeed": lambda folder, model: save_megatron_deepspeed(
        folder, model, Form(tensor=RANKS, names="legacy"), layers=True
    ),
}


def read_by_this_process() -> int:
    words = Path("/proc/self/io").read_text().split()
    return int(words[words.index("rchar:") + 1])


@pytest.mark.parametrize("dim", [0, 1], ids=["rows", "columns"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_reads_at_most_a_tenth_more_than_is_stored_of_its_part(layout: str, dim: int, tmp_path: Path) -> None:
    family = "llama" if layout == "Megatron-DeepSpeed" else "gpt_neox"
    shared = {"num_key_value_heads": RANKS} if family == "llama" else {}
    model = build(family, hidden_size=256, intermediate_size=1024, num_hidden_layers=2, vocab_size=512, **shared)
    if family == "gpt_neox":
        model.config.use_parallel_residual = not layout.startswith("Megatron")
    LAYOUTS[layout](tmp_path, model)
    open_checkpoint(tmp_path).close()  # what it imports is not counted
    before, stored = read_by_this_process(), 0
    with open_checkpoint(tmp_path) as checkpoint:
        for name, info in checkpoint.tensors.items():
            cut = min(dim, len(info.shape) - 1)
            index = (slice(None),) * cut + (slice(0, info.shape[cut] // 2),)
            stored += checkpoint.read(name, index).nbytes
        assert checkpoint.bytes_read <= 1.02 * stored
    assert stored > 3_000_000
    assert read_by_this_process() - before <= 1.1 * stored
