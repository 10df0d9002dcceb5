"""Every layout: no changed byte of a header, a table or a setting makes other weights of a checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from checkpoint import Given
from tests.checkpoint.folders import CONFIG, plain_folder, sharded_folder, some_tensors, write_config, written
from tests.checkpoint.readers import deepspeed_folders as deepspeed
from tests.checkpoint.readers.deepspeed_folders import gpt2_layers, layer_files
from tests.checkpoint.readers.hostile import Target, flip_all
from tests.checkpoint.readers.test_dcp import shard
from tests.checkpoint.readers.test_neox import small
from tests.support import megatron, neox
from tests.support.megatron_dist import save_torch_dist

FLIPS = int(os.environ.get("TESSERA_FLIPS", "80"))
"""Changed bytes of each layout: two thousand of all."""
SEED = int(os.environ.get("TESSERA_SEED", "1"))


def tiny(family: str, **more: Any) -> Any:
    sizes = {"n_embd": 8, "n_head": 2} if family == "gpt2" else {"hidden_size": 16, "intermediate_size": 24}
    return small(family, vocab_size=16, **sizes, **more, **({"activation_function": "gelu"} if family == "gpt2" else {}))


def hf_bin(root: Path) -> Target:
    torch.save(some_tensors(), write_config(root) / "pytorch_model.bin")
    return Target(root)


def without_manifest(root: Path) -> Target:
    folder = written(root)
    (folder / "manifest.json").unlink()
    return Target(folder)


def zero3(root: Path) -> Target:
    deepspeed.zero3(root, 3)
    return Target(root)


def zero1(root: Path, *, masters: bool = False) -> Target:
    deepspeed.zero1(root, 2)
    return Target(root, Given(master_weights=masters))


def universal(root: Path, *, stage: int) -> Target:
    folder = deepspeed.zero3(root, 2) if stage == 3 else deepspeed.zero1(root, 2)
    for path in folder.glob("*optim*"):
        path.unlink()
    values = deepspeed.tensors()
    for name in (name for group in deepspeed.GROUPS for name in group):
        (folder / "zero" / name).mkdir(parents=True)
        torch.save({"param": values[name].flatten() if stage == 3 else values[name]}, folder / "zero" / name / "fp32.pt")
    return Target(root)


def tensor_parallel(root: Path, *, told: bool) -> Target:
    """Two ranks: a matrix cut by rows, one by columns, a norm that both have; with the map of the parts, or by the names."""
    folder = root / deepspeed.TAG
    folder.mkdir(parents=True)
    write_config(root)
    (root / "latest").write_text(deepspeed.TAG)
    whole = {"h.0.q_proj.weight": torch.randn(6, 4), "h.0.o_proj.weight": torch.randn(4, 6), "h.0.norm.weight": torch.ones(4)}
    cut = {name: dim for dim, name in enumerate(list(whole)[:2])}
    entries: dict[str, Any] = {}
    for name, tensor in whole.items() if told else ():
        rows, columns = (*tensor.shape, 1)[:2]
        size = (rows // 2, columns) if cut.get(name) == 0 else (rows, columns // 2) if name in cut else (rows,)
        steps, strides = ((columns, 1), (size[-1], 1)) if name in cut else ((1,), (1,))
        pieces = [
            {
                "shape": size,
                "source": (rank * (size[0] * columns if cut.get(name) == 0 else size[-1]) if name in cut else 0, steps),
                "dest": (0, strides),
                "scale": 1,
                "locations": [rank] if name in cut else [0, 1],
            }
            for rank in range(2)
        ]
        ranks = [{"pieces": [piece]} for piece in pieces]
        entries[f"^{name.replace('.', chr(92) + '.')}$"] = {"logical_shape": tuple(tensor.shape), "ranks": ranks}
    for rank in range(2):
        module = {name: t.chunk(2, dim=cut[name])[rank].clone() if name in cut else t for name, t in whole.items()}
        tree = {"module": module, "mp_world_size": 2, "universal_checkpoint_info": {"affine_map": {"params": entries}}}
        torch.save(tree, folder / f"mp_rank_{rank:02d}_model_states.pt")
    return Target(root)


def pipeline(root: Path) -> Target:
    layer_files(root, gpt2_layers())
    write_config(root, CONFIG | {"n_layer": 2})
    return Target(root)


def gpt_neox(root: Path, *, family: str, layers: bool) -> Target:
    neox.save_neox(root, tiny(family), neox.Form(model_parallel=2, pipeline=layers))
    return Target(root, spared=(".yml",))


def megatron_lm(root: Path) -> Target:
    megatron.save_megatron(root, tiny("llama"), megatron.Form(tensor=2, pipeline=2))
    return Target(root)


def megatron_dist(root: Path, *, beside: bool) -> Target:
    save_torch_dist(root, tiny("llama"), megatron.Form(tensor=2, names="fused"), beside=beside)
    return Target(root)


def megatron_deepspeed(root: Path, *, layers: bool) -> Target:
    megatron.save_megatron_deepspeed(root, tiny("gpt2"), megatron.Form(tensor=2, names="legacy"), layers=layers)
    return Target(root)


def distributed(root: Path, *, alone: bool) -> Target:
    tensors = {name: tensor.float() for name, tensor in some_tensors().items() if tensor.dim()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.distributed.checkpoint.state_dict_saver.warnings.warn", lambda *_, **__: None)
        dcp.save(tensors, checkpoint_id=root, no_dist=True)
    if alone:
        (root / ".metadata").rename(root / "__0.metadata")
    return Target(write_config(root))


def distributed_safetensors(root: Path) -> Target:
    full = some_tensors()["transformer.wte.weight"]
    for rank, (begin, end) in enumerate(((0, 4), (4, 8), (8, 11)), start=1):
        shard(root, rank, {"transformer.wte.weight": full[begin:end].clone()}, {"transformer.wte.weight": [begin, 0]})
    return Target(write_config(root))


def adapter(root: Path, *, archive: bool) -> Target:
    model = tiny("llama")
    model.save_pretrained(root / "base")
    (root / "adapter").mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 3, "target_modules": ["o_proj"], "bias": "none"}
    (root / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    place = "base_model.model.model.layers.{}.self_attn.o_proj.lora_{}.weight"
    shapes = {"A": (2, 16), "B": (16, 2)}
    table = {place.format(layer, side): torch.randn(shape) for layer in range(2) for side, shape in shapes.items()}
    if archive:
        torch.save(table, root / "adapter" / "adapter_model.bin")
    else:
        save_file(table, root / "adapter" / "adapter_model.safetensors")
    # The rank's scale is a number of the adapter's that no other number tells to be right.
    return Target(root / "adapter", Given(base=str(root / "base")), spared=("adapter_config.json",))


LAYOUTS: dict[str, Callable[[Path], Target]] = {
    "hf": lambda root: Target(plain_folder(root)),
    "hf-shards": lambda root: (sharded_folder(root), Target(root))[1],
    "hf-bin": hf_bin,
    "tessera": lambda root: Target(written(root)),
    "tessera-without-manifest": without_manifest,
    "zero3": zero3,
    "zero1": zero1,
    "zero1-masters": lambda root: zero1(root, masters=True),
    "universal2": lambda root: universal(root, stage=2),
    "universal3": lambda root: universal(root, stage=3),
    "tensor-parallel": lambda root: tensor_parallel(root, told=False),
    "tensor-parallel-told": lambda root: tensor_parallel(root, told=True),
    "pipeline": pipeline,
    "neox-layers": lambda root: gpt_neox(root, family="gpt_neox", layers=True),
    "neox-ranks": lambda root: gpt_neox(root, family="llama", layers=False),
    "megatron": megatron_lm,
    "megatron-dist": lambda root: megatron_dist(root, beside=True),
    "megatron-dist-items": lambda root: megatron_dist(root, beside=False),
    "megatron-deepspeed-layers": lambda root: megatron_deepspeed(root, layers=True),
    "megatron-deepspeed-ranks": lambda root: megatron_deepspeed(root, layers=False),
    "dcp": lambda root: distributed(root, alone=False),
    "dcp-alone": lambda root: distributed(root, alone=True),
    "dcp-safetensors": distributed_safetensors,
    "adapter": lambda root: adapter(root, archive=False),
    "adapter-bin": lambda root: adapter(root, archive=True),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_changed_byte_of_a_table_is_refused_or_does_no_harm(layout: str, tmp_path: Path) -> None:
    target = LAYOUTS[layout](tmp_path / "save")
    ends = flip_all(tmp_path / "save", target, FLIPS, SEED)
    assert ends["refused"], "the layout's tables are not looked at"
    print(f"{layout}: {ends['refused']} refused, {ends['no harm']} without harm")
