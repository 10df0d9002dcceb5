"""By the kernel's own count, opening a checkpoint and reading a rank's half of it takes little more than that half's bytes."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from transformers import PreTrainedModel

from checkpoint import Given, open_checkpoint
from checkpoint.given import NOTHING_GIVEN
from finetune.trained.export import export
from tests.checkpoint.readers.deepspeed_folders import (
    TAG,
    layer_files,
    model_file,
    optimizer_file,
    part,
    save_optimizer,
    zero3_of,
)
from tests.checkpoint.readers.test_dcp import shard
from tests.checkpoint.readers.trainers_dcp import titan_name, titan_tensor
from tests.support.megatron import Form, save_megatron, save_megatron_deepspeed
from tests.support.megatron_dist import save_torch_dist
from tests.support.models import build
from tests.support.neox import Form as NeoxForm
from tests.support.neox import save_neox

RANKS = 4
"""That save; two read."""


RANK = 2
"""Of an adapter, whose factors are read whole beside a slice."""


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


def distributed_safetensors(folder: Path, model: PreTrainedModel) -> None:
    state = model.state_dict()
    for rank in range(RANKS):
        held = {name: value.chunk(RANKS)[rank].clone() for name, value in state.items() if value.shape[0] >= RANKS}
        starts = {name: [rank * len(value), *[0] * (value.dim() - 1)] for name, value in held.items()}
        shard(folder, rank + 1, held, starts)
    model.config.save_pretrained(folder)


def torchtitan(folder: Path, model: PreTrainedModel) -> None:
    heads, groups = model.config.num_attention_heads, model.config.num_key_value_heads
    state = {titan_name(name): titan_tensor(name, value, heads, groups) for name, value in model.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    model.config.save_pretrained(folder)


def zero3_with_frozen(folder: Path, model: PreTrainedModel) -> None:
    """Half of the tensors in the ranks' optimizer files, the others untrained in pieces in their model files."""
    state = model.state_dict()
    frozen = dict(list(state.items())[::2])
    save = zero3_of(folder, {name: value for name, value in state.items() if name not in frozen}, RANKS)
    for rank in range(RANKS):
        tree = torch.load(model_file(save, rank))
        tree["frozen_param_shapes"] = OrderedDict((name, value.shape) for name, value in frozen.items())
        tree["frozen_param_fragments"] = OrderedDict((name, part(value, rank, RANKS)) for name, value in frozen.items())
        torch.save(tree, model_file(save, rank))


def zero3_on_disk(folder: Path, model: PreTrainedModel) -> None:
    """The masters in swap files."""
    save, state = zero3_of(folder, model.state_dict(), RANKS), model.state_dict()
    for rank in range(RANKS):
        flat = torch.cat([part(value, rank, RANKS) for value in state.values()])
        swap = save / "offloaded_tensors" / f"rank{rank:02d}"
        swap.mkdir(parents=True)
        (swap / f"0_{len(state) - 1}.tensor.swp").write_bytes(flat.numpy().tobytes())
        held = {"fp32_flat_groups": [torch.empty(0)], "zero_stage": 3, "partition_count": RANKS}
        save_optimizer(optimizer_file(save, rank), held)


def zero12(folder: Path, model: PreTrainedModel) -> None:
    """A module in bfloat16 and the masters of four ranks."""
    save, state = folder / TAG, model.state_dict()
    save.mkdir(parents=True)
    (folder / "latest").write_text(TAG)
    module = OrderedDict((name, value.bfloat16()) for name, value in state.items())
    shapes = [OrderedDict((name, value.shape) for name, value in state.items())]
    torch.save({"module": module, "param_shapes": shapes}, save / "mp_rank_00_model_states.pt")
    flat = torch.cat([value.flatten() for value in state.values()])
    for rank in range(RANKS):
        held = {"single_partition_of_fp32_groups": [part(flat, rank, RANKS)], "partition_count": [RANKS]}
        save_optimizer(optimizer_file(save, rank), held)
    model.config.save_pretrained(folder)


def masters(folder: Path, model: PreTrainedModel) -> Given:
    zero12(folder, model)
    return Given(master_weights=True)


def universal(folder: Path, model: PreTrainedModel, *, flat: bool) -> None:
    """What ``ds_to_universal`` makes of ZeRO-3, flat, or of ZeRO-1."""
    if flat:
        zero3_of(folder, model.state_dict(), RANKS)
    else:
        zero12(folder, model)
    for file in (folder / TAG).glob("*optim*"):
        file.unlink()
    for name, value in model.state_dict().items():
        (folder / TAG / "zero" / name).mkdir(parents=True)
        torch.save({"param": value.flatten() if flat else value.clone()}, folder / TAG / "zero" / name / "fp32.pt")


def tensor_parallel(folder: Path, model: PreTrainedModel) -> None:
    """AutoTP's, of before a save says how its tensors are cut: the names of the layers say it."""
    rows, columns = r".*(query_key_value|dense_h_to_4h|embed_in|lm_head)\.\w+", r".*(attention\.dense|dense_4h_to_h)\.weight"
    (folder / TAG).mkdir(parents=True)
    (folder / "latest").write_text(TAG)
    for rank in range(RANKS):
        module = OrderedDict(model.state_dict())
        for name, value in module.items():
            dim = 0 if re.fullmatch(rows, name) else 1 if re.fullmatch(columns, name) else None
            module[name] = value.clone() if dim is None else value.chunk(RANKS, dim)[rank].clone()
        tree = {"module": module, "mp_world_size": RANKS, "global_steps": 2}
        torch.save(tree, folder / TAG / f"mp_rank_{rank:02d}_model_states.pt")
    model.config.save_pretrained(folder)


def adapter(folder: Path, model: PreTrainedModel) -> None:
    """LoRA on every linear layer of a base beside it."""
    model.save_pretrained(folder / "base")
    table: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict().items():
        if value.dim() == 2 and ".layers." in name:
            place = f"base_model.model.{name.removesuffix('.weight')}.lora"
            table |= {
                f"{place}_A.weight": torch.ones(RANK, value.shape[1]),
                f"{place}_B.weight": torch.ones(value.shape[0], RANK),
            }
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2, "base_model_name_or_path": str(folder / "base")}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(table, folder / "adapter_model.safetensors")


def cut(folder: Path, model: PreTrainedModel) -> None:
    """What ``export`` wrote for four ranks."""
    model.save_pretrained(folder / "whole")
    export(folder / "whole", folder / "cut", ranks=RANKS)
    shutil.rmtree(folder / "whole")
    for file in (folder / "cut").iterdir():
        file.rename(folder / file.name)


LAYOUTS: dict[str, Callable[[Path, PreTrainedModel], object]] = {
    "Hugging Face": hugging_face,
    "Hugging Face, .bin": pickled,
    "Hugging Face, cut for ranks": cut,
    "ZeRO-3": zero3,
    "ZeRO-3, half of it frozen": zero3_with_frozen,
    "ZeRO-3 on NVMe": zero3_on_disk,
    "ZeRO-0, 1 or 2": zero12,
    "ZeRO-1 or 2, masters": masters,
    "universal of ZeRO-3": lambda folder, model: universal(folder, model, flat=True),
    "universal of ZeRO-1": lambda folder, model: universal(folder, model, flat=False),
    "AutoTP": tensor_parallel,
    "pipeline": pipeline,
    "torch.distributed.checkpoint": distributed,
    "torch.distributed.checkpoint in safetensors": distributed_safetensors,
    "torchtitan": torchtitan,
    "GPT-NeoX": lambda folder, model: save_neox(folder, model, NeoxForm(model_parallel=RANKS)),
    "GPT-NeoX, no pipeline": lambda folder, model: save_neox(folder, model, NeoxForm(model_parallel=RANKS, pipeline=False)),
    "Megatron-LM": lambda folder, model: save_megatron(folder, model, Form(tensor=RANKS, names="fused")),
    "Megatron-LM torch_dist": lambda folder, model: save_torch_dist(folder, model, Form(tensor=RANKS, names="fused")),
    "Megatron-LM torch_dist, no stacks": lambda folder, model: save_torch_dist(
        folder, model, Form(tensor=RANKS, names="fused"), stacked=False
    ),
    "Megatron-DeepSpeed": lambda folder, model: save_megatron_deepspeed(
        folder, model, Form(tensor=RANKS, names="legacy"), layers=True
    ),
    "Megatron-DeepSpeed, no pipeline": lambda folder, model: save_megatron_deepspeed(
        folder, model, Form(tensor=RANKS, names="legacy"), layers=False
    ),
    "PEFT adapter": adapter,
}
"""By which the same model is saved. One may give what is said of it when it is opened."""
IN_LLAMA = ("Megatron-DeepSpeed", "Megatron-DeepSpeed, no pipeline", "torchtitan")


def read_by_this_process() -> int:
    words = Path("/proc/self/io").read_text().split()
    return int(words[words.index("rchar:") + 1])


@pytest.mark.parametrize("dim", [None, 0, 1], ids=["whole", "rows", "columns"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_reads_at_most_a_tenth_more_than_is_stored_of_its_part(layout: str, dim: int | None, tmp_path: Path) -> None:
    """The only rank of a server, and one of two."""
    family = "llama" if layout in IN_LLAMA else "gpt_neox"
    shared = {"num_key_value_heads": RANKS} if family == "llama" else {}
    model = build(family, hidden_size=256, intermediate_size=1024, num_hidden_layers=2, vocab_size=512, **shared)
    if family == "gpt_neox":
        model.config.use_parallel_residual = not layout.startswith("Megatron")
    said = LAYOUTS[layout](tmp_path, model)
    given = said if isinstance(said, Given) else NOTHING_GIVEN
    open_checkpoint(tmp_path, given=given).close()  # what it imports is not counted
    before, stored = read_by_this_process(), 0
    with open_checkpoint(tmp_path, given=given) as checkpoint:
        for name, info in checkpoint.tensors.items():
            index: tuple[slice, ...] | None = None
            if dim is not None:
                cut_dim = min(dim, len(info.shape) - 1)
                index = (slice(None),) * cut_dim + (slice(0, info.shape[cut_dim] // 2),)
            read = checkpoint.read(name, index)
            stored += read.nbytes
            if layout == "PEFT adapter" and read.dim() == 2 and ".layers." in name:
                stored += sum(read.shape) * RANK * read.itemsize
        assert checkpoint.bytes_read <= 1.02 * stored
    assert stored > 1_500_000
    assert read_by_this_process() - before <= 1.1 * stored
