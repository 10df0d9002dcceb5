"""Trains tiny models with DeepSpeed alone and keeps the folders it saves: what Tessera's readers are tried on.

    python deepspeed_saves.py FOLDER NAME:RANKS...

Nothing of Tessera is imported. Libraries are imported once; then the ranks are forked. ``OPS`` in the environment is the folder
of DeepSpeed's operations, built, of which some cases need one. Each NAME becomes ``FOLDER/NAME`` with
the save's root and ``config.json``, the trainer's own master weights (``expected.pt``: float32, every name) and its logits
(``logits.pt``).
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import json
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
from deepspeed_parts import layers_of, merged  # beside this script
from transformers import AutoConfig, AutoModelForCausalLM

# Taken by the ranks that need them, each of which would spend seconds on importing them for itself.
for part in (
    "deepspeed.checkpoint.ds_to_universal",
    "deepspeed.pipe",
    "peft",
    *(f"transformers.models.{family}.modeling_{family}" for family in ("gpt2", "gpt_neox", "llama")),
):
    importlib.import_module(part)

# Of use to inference alone, and a minute of compiling on a machine that has not built it yet.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

LLAMA = {
    "model_type": "llama",
    "vocab_size": 101,
    "hidden_size": 24,
    "intermediate_size": 42,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
NEOX = {
    "model_type": "gpt_neox",
    "vocab_size": 101,
    "hidden_size": 24,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
WIDE = NEOX | {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 3, "vocab_size": 2001}
"""Large enough for a group that goes to NVMe."""
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 101,
    "n_embd": 24,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 32,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
IDS = [[3, 14, 15, 92, 65, 35, 89, 79]]


def described(config: dict[str, Any]) -> Any:
    options = dict(config)
    return AutoConfig.for_model(options.pop("model_type"), **options)


def make(config: dict[str, Any], seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(described(config), attn_implementation="eager")
    with torch.no_grad():  # biases and norms that are all 0 or 1 would hide an exchange
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.05)
    return model.float()


def settings(stage: int, dtype: str, **zero: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, **zero},
        "bf16": {"enabled": dtype == "bf16"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def groups_of(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Two groups, as trainers make them: with weight decay and without."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    decay = [parameter for name, parameter in named if parameter.dim() > 1]
    plain = [parameter for name, parameter in named if parameter.dim() <= 1]
    return [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]


def train(
    model: torch.nn.Module, config: dict[str, Any], *, groups: bool = True, steps: int = 2, optimizer: Any = torch.optim.AdamW
) -> Any:
    parameters: Any = groups_of(model) if groups else [p for p in model.parameters() if p.requires_grad]
    optimizer = optimizer(parameters, lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    for step in range(steps):
        ids = torch.tensor(IDS) + step
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    return engine


def keep(engine: Any, folder: Path, config: dict[str, Any], *, masters: bool = True, **options: Any) -> None:
    """Save; and beside the save the weights and logits that the engine itself has: its masters, or those it computes with."""
    engine.save_checkpoint(str(folder / "save"), client_state={"model_config": described(config).to_dict()}, **options)
    engine.eval()
    with torch.no_grad():
        logits = engine(input_ids=torch.tensor(IDS)).logits.float()
    whole: dict[str, torch.Tensor] = {}
    from deepspeed.utils import safe_get_full_fp32_param

    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        value = safe_get_full_fp32_param(parameter) if masters and parameter.requires_grad else None
        if value is None:
            with deepspeed.zero.GatheredParameters([parameter]):
                value = parameter.detach().float().clone()
        whole[name] = value.detach().float().cpu().reshape(getattr(parameter, "ds_shape", parameter.shape)).clone()
    finish(folder, config, whole, logits)


def finish(folder: Path, config: dict[str, Any], whole: dict[str, torch.Tensor], logits: torch.Tensor) -> None:
    if dist.get_rank() == 0:
        (folder / "save" / "config.json").write_text(json.dumps(config))
        torch.save(whole, folder / "expected.pt")
        torch.save(logits, folder / "logits.pt")
    dist.barrier()


def zero3_groups(folder: Path) -> None:
    """Two groups of parameters, tied embeddings, the masters in small sub-groups."""
    config = LLAMA | {"tie_word_embeddings": True}
    keep(train(make(config), settings(3, "bf16", sub_group_size=500)), folder, config)


def zero3_float(folder: Path) -> None:
    """Trained in float32, with an embedding that is not trained."""
    model = make(NEOX)
    model.get_input_embeddings().weight.requires_grad_(False)
    keep(train(model, settings(3, "fp32"), groups=False), folder, NEOX)


def zero3_offload(folder: Path) -> None:
    offload = {"device": "cpu"}
    keep(train(make(NEOX), settings(3, "bf16", offload_optimizer=offload, offload_param=offload)), folder, NEOX)


def zero2_masters(folder: Path) -> None:
    config = LLAMA | {"tie_word_embeddings": True}
    keep(train(make(config), settings(2, "bf16")), folder, config)


def zero1_robin(folder: Path) -> None:
    """Kept are the weights in bfloat16: what DeepSpeed 0.19 gives as masters are then those of other parameters."""
    keep(train(make(NEOX), settings(1, "bf16", round_robin_gradients=True)), folder, NEOX, masters=False)


def zero0(folder: Path) -> None:
    keep(train(make(GPT2), settings(0, "fp32"), groups=False), folder, GPT2)


def load_ops(*names: str) -> None:
    """Load DeepSpeed's operations as they lie in ``OPS``, built before: its own loader would build them anew."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    for name in names:
        library = Path(os.environ["OPS"]) / name / f"{name}.so"
        spec = importlib.util.spec_from_file_location(name, library)
        OpBuilder._loaded_ops[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(OpBuilder._loaded_ops[name])
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)  # file access finds the symbols of pinned memory this way


def half_masters(stage: int, *, offload: str = "", moments: bool = True, **zero: Any) -> Callable[[Path], None]:
    """Masters, and with ``moments`` all of the optimizer's state, in bfloat16; in 32 bits there are none."""

    def case(folder: Path) -> None:
        model = make(LLAMA | {"tie_word_embeddings": True})
        options = settings(stage, "bf16", **zero)
        options["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": moments}
        optimizer: Any = torch.optim.AdamW
        if offload:
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            load_ops("cpu_adam")
            optimizer = functools.partial(DeepSpeedCPUAdam, fp32_optimizer_states=not moments)
            options["zero_optimization"]["offload_optimizer"] = {"device": offload}
        keep(train(model, options, optimizer=optimizer), folder, LLAMA | {"tie_word_embeddings": True})

    return case


def on_disk(folder: Path) -> None:
    """Optimizer and parameters on NVMe: a group of more than a mebibyte there, one that stays, and an untrained head."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    load_ops("cpu_adam", "pin_memory", "async_io")
    model = make(WIDE)
    model.get_output_embeddings().weight.requires_grad_(False)
    disk = {"device": "nvme", "nvme_path": str(folder / "disk"), "buffer_count": 4}
    parameters = disk | {"buffer_size": 2 << 20, "buffer_count": 8}
    options = settings(3, "bf16", offload_optimizer=disk, offload_param=parameters, sub_group_size=1_200_000)
    options["aio"] = {"block_size": 1 << 20, "queue_depth": 4, "intra_op_parallelism": 2}
    keep(train(model, options, optimizer=DeepSpeedCPUAdam, groups=False), folder, WIDE)


def adapted(stage: int, *, excluded: bool = False, convert: bool = False) -> Callable[[Path], None]:
    """A model with peft's adapter in it, and a head that is trained whole beside it; kept are the merged weights."""

    def case(folder: Path) -> None:
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(
            r=3,
            lora_alpha=7,
            use_rslora=True,
            target_modules=["q_proj", "down_proj", "embed_tokens"],
            rank_pattern={"down_proj": 5},
            modules_to_save=["lm_head"],
        )
        base = make(LLAMA)
        if dist.get_rank() == 0 and excluded:
            base.save_pretrained(folder / "base")
        model = get_peft_model(base, lora)
        engine = train(model, settings(stage, "fp32"), groups=stage == 3)
        options = {"exclude_frozen_parameters": True} if excluded else {}
        keep(engine, folder, LLAMA, masters=False, **options)
        if dist.get_rank() == 0:
            lora.save_pretrained(str(folder / "save"))
            torch.save(merged(torch.load(folder / "expected.pt"), lora.lora_alpha), folder / "expected.pt")
        dist.barrier()
        if convert:
            universal_of(folder / "save")

    return case


def pipeline(config: dict[str, Any]) -> Callable[[Path], None]:
    """Two stages of transformers' blocks."""

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def case(folder: Path) -> None:
        from deepspeed.pipe import PipelineModule

        model = make(config)
        whole = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        with torch.no_grad():
            logits = model(input_ids=torch.tensor(IDS)).logits
        module = PipelineModule(layers=layers_of(model), num_stages=2, loss_fn=loss, partition_method="uniform")
        optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
        options = settings(0, "fp32") | {"train_batch_size": 1}
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=options, dist_init_required=False)
        engine.train_batch(iter([(torch.tensor(IDS), torch.tensor(IDS))]))
        engine.save_checkpoint(str(folder / "save"), client_state={"config": described(config).to_json_string()})
        finish(folder, config, whole, logits)

    return case


def universal_of(save: Path) -> None:
    """Convert what ``latest`` names, as DeepSpeed's own tool does."""
    from deepspeed.checkpoint import ds_to_universal

    tag = (save / "latest").read_text()
    if dist.get_rank() == 0:
        options = ["--num_extract_workers", "1", "--num_merge_workers", "1", "--inject_missing_state"]
        arguments = ["--input_folder", str(save / tag), "--output_folder", str(save / f"{tag}_universal"), *options]
        sys.argv = ["ds_to_universal", *arguments]
        ds_to_universal.main(ds_to_universal.parse_arguments())
        (save / "latest").unlink()
        shutil.rmtree(save / tag)
    dist.barrier()


def universal3(folder: Path) -> None:
    zero3_groups(folder)
    universal_of(folder / "save")


def universal2(folder: Path) -> None:
    zero2_masters(folder)
    universal_of(folder / "save")


def tensor_parallel(config: dict[str, Any], stage: int) -> Callable[[Path], None]:
    def case(folder: Path) -> None:
        from deepspeed import tp_model_init

        model = make(config)
        whole = {name: value.clone() for name, value in model.state_dict().items()}
        with torch.no_grad():
            logits = model(input_ids=torch.tensor(IDS)).logits
        model = tp_model_init(model, tp_size=2, dtype=torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        options = settings(stage, "fp32") | {"tensor_parallel": {"autotp_size": 2}}
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=options, dist_init_required=False)
        engine.save_checkpoint(str(folder / "save"), client_state={"config": described(config).to_json_string()})
        finish(folder, config, whole, logits)

    return case


CASES: dict[str, Callable[[Path], None]] = {
    "zero3-groups": zero3_groups,
    "zero3-float": zero3_float,
    "zero3-offload": zero3_offload,
    "zero2-masters": zero2_masters,
    "zero1-robin": zero1_robin,
    "zero0": zero0,
    "zero3-half": half_masters(3, sub_group_size=500),
    "zero3-half-offload": half_masters(3, offload="cpu", moments=False),
    "zero2-half": half_masters(2),
    "zero2-half-offload": half_masters(2, offload="cpu"),
    "zero1-half": half_masters(1),
    "zero3-disk": on_disk,
    "zero3-lora": adapted(3),
    "zero2-lora": adapted(2),
    "zero2-lora-alone": adapted(2, excluded=True),
    "universal3-lora": adapted(3, convert=True),
    "pipeline": pipeline(LLAMA),
    "pipeline-neox": pipeline(NEOX),
    "pipeline-gpt2": pipeline(GPT2),
    "universal3": universal3,
    "universal2": universal2,
    "parallel-llama": tensor_parallel(LLAMA, 1),
    "parallel-tied": tensor_parallel(LLAMA | {"tie_word_embeddings": True}, 0),
    "parallel-neox": tensor_parallel(NEOX, 1),
    "parallel-uneven": tensor_parallel(LLAMA | {"num_attention_heads": 6, "num_key_value_heads": 3, "vocab_size": 103}, 1),
}


def rank_main(rank: int, ranks: int, folder: Path, name: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting-{name}", rank=rank, world_size=ranks)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    if rank == 0:
        (folder / name).mkdir()
    dist.barrier()
    CASES[name](folder / name)
    dist.barrier()


def run(folder: Path, ranks: int, name: str) -> int:
    """One case in processes of its own: an engine leaves traces in its process. Returns the worst exit status."""
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                rank_main(rank, ranks, folder, name)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        children.append(child)
    return max(abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) for child in children)


def main(folder: Path, cases: list[str]) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    named = [(name, int(ranks)) for name, _, ranks in (case.partition(":") for case in cases)]
    return next((status for name, ranks in named if (status := run(folder, ranks, name))), 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
