"""Saves of a GPT-NeoX of Pythia-410M's shape as trainers leave them, made by four ranks: what ``benchmarks.load`` opens.

    python load_saves.py FOLDER NAME...

A plain training script: nothing of Tessera is imported. The weights are drawn by a seed, one tiny step is taken, and what the
trainer keeps is all that is left. Each NAME becomes ``FOLDER/NAME``, with ``config.json`` beside the save.
"""

from __future__ import annotations

import os
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1", LOCAL_RANK="0")

import deepspeed
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

RANKS = 4
SHAPE: dict[str, float] = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "vocab_size": 50_304,
    "max_position_embeddings": 2048,
    "rotary_pct": 0.25,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
"""405 million parameters."""


def configuration() -> PreTrainedConfig:
    return AutoConfig.for_model("gpt_neox", **SHAPE, dtype="bfloat16", architectures=["GPTNeoXForCausalLM"])


def make_model() -> Any:
    """The same on every rank."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]  # transformers leaves it unannotated
        configuration(), dtype=torch.bfloat16, attn_implementation="eager"
    )


def settings(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **more,
    }


def trained(folder: Path, stage: int) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings(stage), dist_init_required=False)
    ids = torch.arange(8)[None]
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
    engine.save_checkpoint(str(folder))


def zero3(folder: Path) -> None:
    trained(folder, 3)


def zero2(folder: Path) -> None:
    trained(folder, 2)


def universal(folder: Path) -> None:
    """What DeepSpeed's own tool makes of the ZeRO-3 save, which must be there."""
    from deepspeed.checkpoint import ds_to_universal

    if dist.get_rank() == 0:
        save = folder.with_name("zero3")
        tag = (save / "latest").read_text()
        workers = ["--num_extract_workers", "1", "--num_merge_workers", "1", "--inject_missing_state"]
        arguments = ["--input_folder", str(save / tag), "--output_folder", str(folder / tag), *workers]
        sys.argv = ["ds_to_universal", *arguments]
        ds_to_universal.main(ds_to_universal.parse_arguments())
        (folder / "latest_universal").write_text(tag)
        for moments in (*folder.rglob("exp_avg.pt"), *folder.rglob("exp_avg_sq.pt")):
            moments.unlink()  # no reader of weights looks at them, and they are two thirds of the disk
    dist.barrier()


class Block(torch.nn.Module):
    """A block of transformers as a pipeline's layer: hidden states in, hidden states out."""

    def __init__(self, model: Any, number: int) -> None:
        super().__init__()
        self.block = model.gpt_neox.layers[number]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def pipeline(folder: Path) -> None:
    """A stage on each rank."""
    from deepspeed.pipe import PipelineModule

    model = make_model()
    body = model.gpt_neox
    blocks = [Block(model, number) for number in range(len(body.layers))]
    layers = [body.embed_in, *blocks, body.final_layer_norm, model.get_output_embeddings()]
    module = PipelineModule(layers=layers, num_stages=RANKS, loss_fn=lambda out, _: out.sum(), partition_method="uniform")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    config = settings(0, train_batch_size=1)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config, dist_init_required=False)
    engine.save_checkpoint(str(folder))


def autotp(folder: Path) -> None:
    """Four tensor-parallel ranks."""
    model = deepspeed.tp_model_init(make_model(), tp_size=RANKS, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    config = settings(1, tensor_parallel={"autotp_size": RANKS})
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    engine.save_checkpoint(str(folder))


def fsdp(folder: Path) -> None:
    """FSDP2 on four ranks, by ``torch.distributed.checkpoint``."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = make_model()
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in model.gpt_neox.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    state_dict_saver.save({"model": get_model_state_dict(model)}, checkpoint_id=folder / "step-1")


def whole(folder: Path) -> None:
    """A Hugging Face folder, in four files."""
    if dist.get_rank() == 0:
        make_model().save_pretrained(folder, max_shard_size="220MB")
    dist.barrier()


def pickled(folder: Path) -> None:
    """A Hugging Face folder of before safetensors."""
    if dist.get_rank() == 0:
        torch.save(make_model().state_dict(), folder / "pytorch_model.bin")
    dist.barrier()


def adapter(folder: Path) -> None:
    """LoRA on the Hugging Face folder, which must be there."""
    from peft import LoraConfig, get_peft_model

    if dist.get_rank() == 0:
        base = AutoModelForCausalLM.from_pretrained(folder.with_name("hf"), dtype=torch.bfloat16)
        lora = LoraConfig(r=16, target_modules=["query_key_value", "dense"], init_lora_weights=False, task_type="CAUSAL_LM")
        get_peft_model(base, lora).save_pretrained(str(folder))
    dist.barrier()


CASES: dict[str, Callable[[Path], None]] = {
    "zero3": zero3,
    "zero2": zero2,
    "universal": universal,
    "pipeline": pipeline,
    "autotp": autotp,
    "dcp": fsdp,
    "hf": whole,
    "bin": pickled,
    "peft": adapter,
}


def rank_main(rank: int, folder: Path, name: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    meeting = folder.parent / f"{name}-meeting"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    CASES[name](folder)
    if rank == 0 and name != "peft":
        configuration().save_pretrained(folder)
        meeting.unlink(missing_ok=True)
    dist.barrier()


def run(folder: Path, name: str) -> int:
    """One case in processes of its own; the folder appears when all have ended well. Returns the worst exit status."""
    made = folder / f"{name}-unfinished"
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    (folder / f"{name}-meeting").unlink(missing_ok=True)  # of a run that was ended, whose ranks new ones would wait for
    children = []
    for rank in range(RANKS):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                rank_main(rank, made, name)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        children.append(child)
    status = max(abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) for child in children)
    if status == 0:
        made.rename(folder / name)
    return status


def main(folder: Path, names: list[str]) -> int:
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    return next((status for name in names if not (folder / name).exists() and (status := run(folder, name))), 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
