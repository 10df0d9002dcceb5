"""Writes checkpoints by torch.distributed.checkpoint as training scripts do; run by torchrun, it knows nothing of Tessera.

torchrun --nproc-per-node RANKS trainers_dcp.py OUT
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM


def titan_name(name: str) -> str:
    """The name torchtitan has for a tensor of transformers' Llama."""
    for hf, titan in {
        "model.embed_tokens": "tok_embeddings", "lm_head": "output", "model.norm": "norm", "model.layers": "layers",
        "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv",
        "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2",
        "mlp.up_proj": "feed_forward.w3", "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
    }.items():  # fmt: skip
        name = name.replace(hf, titan)
    return name


def titan_tensor(name: str, tensor: torch.Tensor, heads: int, groups: int) -> torch.Tensor:
    """The rows of q and k as torchtitan orders them: the two halves of each head interleaved."""
    count = heads if "q_proj" in name else groups if "k_proj" in name else 0
    if not count:
        return tensor
    return tensor.view(count, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape).contiguous()


class Holder(nn.Module):
    """Nothing but parameters by the names of a state dict, so that FSDP can shard them."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in state.items():
            *path, last = name.split(".")
            place: nn.Module = self
            for part in path:
                if not hasattr(place, part):
                    place.add_module(part, nn.Module())
                place = getattr(place, part)
            place.register_parameter(last, nn.Parameter(tensor.clone()))


def main(out: Path) -> None:
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=101, hidden_size=24, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).float()
    full = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ids = torch.arange(20).view(1, -1)
    if dist.get_rank() == 0:
        out.mkdir(parents=True, exist_ok=True)
        with torch.no_grad():
            torch.save({"state": full, "logits": model(ids).logits}, out / "expected.pt")
        config.architectures = ["LlamaForCausalLM"]
        config.save_pretrained(out)
    dist.barrier()
    if world == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for layer in model.model.layers:
            plan = {name: ColwiseParallel() for name in ("mlp.gate_proj", "mlp.up_proj")}
            parallelize_module(layer, mesh["tp"], {**plan, "mlp.down_proj": RowwiseParallel()})
        sharding = mesh["dp"]
    else:
        sharding = init_device_mesh("cpu", (world,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=sharding)
    fully_shard(model, mesh=sharding)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    if world != 4:
        model(ids).logits.sum().backward()
        optimizer.step()
    state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"app": {"model": state, "optim": optimizer_state}, "step": 7}, checkpoint_id=out / "script" / "step-7")
    dcp.save({"model": state}, checkpoint_id=out / "accelerate" / "checkpoint-30" / "pytorch_model_fsdp_0")
    dcp.save(
        {"model": state}, use_collectives=False, checkpoint_id=out / "alone",
        storage_writer=dcp.FileSystemWriter(out / "alone", single_file_per_rank=False),
    )  # fmt: skip
    titan = Holder({titan_name(n): titan_tensor(n, t, 4, 2) for n, t in full.items()})
    fully_shard(titan, mesh=sharding)
    dcp.save({**get_model_state_dict(titan), "train_state": {"step": 9}}, checkpoint_id=out / "titan" / "checkpoint" / "step-9")
    dcp.save(
        dict(get_model_state_dict(model)), checkpoint_id=out / "shards",
        storage_writer=dcp.HuggingFaceStorageWriter(str(out / "shards"), save_distributed=True),
    )  # fmt: skip
    dist.barrier()
    if dist.get_rank() == 0:
        (out / "done.json").write_text(json.dumps(sorted(os.listdir(out))))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
