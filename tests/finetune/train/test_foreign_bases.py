"""Training begins with the loss of the trainer that wrote the checkpoint, whatever its layout and wherever the tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from transformers import PreTrainedModel

from finetune.config.load import load_config
from finetune.data.batches import step_batches
from finetune.data.pack import SampleOrder, Share
from finetune.data.prepare import prepare
from finetune.data.rows import open_rows
from finetune.model.build import build_empty
from finetune.train.initial_model import InitialModel
from tests.checkpoint.readers import deepspeed_folders as deepspeed
from tests.checkpoint.readers.test_neox import small
from tests.finetune.support import run_command, write_config
from tests.finetune.train.test_tune import losses_of
from tests.support import megatron, neox
from tests.support.models import tokenizer


def parameters(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def described(root: Path, model: PreTrainedModel) -> None:
    model.config.save_pretrained(root)


def zero3(root: Path, model: PreTrainedModel) -> None:
    deepspeed.zero3_of(root, parameters(model), 2)
    described(root, model)


def modules(root: Path, model: PreTrainedModel, ranks: int = 1) -> Path:
    """The module of each tensor-parallel rank, of which all but norms and the vocabulary are cut by rows or columns."""
    folder = root / deepspeed.TAG
    folder.mkdir(parents=True)
    (root / "latest").write_text(deepspeed.TAG)
    described(root, model)
    dims = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "gate_proj": 0, "up_proj": 0, "o_proj": 1, "down_proj": 1}
    for rank in range(ranks):
        table = {}
        for name, tensor in parameters(model).items():
            dim = dims.get(name.split(".")[-2])
            table[name] = tensor if dim is None else tensor.chunk(ranks, dim)[rank].clone()
        shapes = [{name: tensor.shape for name, tensor in table.items()}]
        torch.save({"module": table, "param_shapes": shapes}, folder / f"mp_rank_{rank:02d}_model_states.pt")
    return folder


def universal(root: Path, model: PreTrainedModel) -> None:
    folder = modules(root, model)
    for name, tensor in parameters(model).items():
        (folder / "zero" / name).mkdir(parents=True)
        torch.save({"param": tensor}, folder / "zero" / name / "fp32.pt")


def pipeline(root: Path, model: PreTrainedModel) -> None:
    folder = root / deepspeed.TAG
    folder.mkdir(parents=True)
    (root / "latest").write_text(deepspeed.TAG)
    described(root, model)
    layers: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in parameters(model).items():
        parts = name.removeprefix("model.").split(".")
        number = 1 + int(parts[1]) if parts[0] == "layers" else {"embed_tokens": 0, "norm": 3, "lm_head": 4}[parts[0]]
        layers.setdefault(number, {})[".".join(parts[2:] if parts[0] == "layers" else parts[1:])] = tensor.clone()
    for number, table in layers.items():
        torch.save(table, folder / f"layer_{number:02d}-model_states.pt")


def distributed(root: Path, model: PreTrainedModel) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.distributed.checkpoint.state_dict_saver.warnings.warn", lambda *_, **__: None)
        dcp.save({"app": {"model": parameters(model)}, "step": 3}, checkpoint_id=root, no_dist=True)
    described(root, model)


def gpt_neox(root: Path, model: PreTrainedModel) -> None:
    kinds = {"tokenizer-type": "HFTokenizer", "vocab-file": "/x/own.json"}
    neox.save_neox(root, model, neox.Form(model_parallel=2), **kinds)


def adapter(root: Path, model: PreTrainedModel) -> None:
    """An adapter beside its base, and from then on in the model."""
    from peft import LoraConfig, get_peft_model

    model.save_pretrained(root / "whole")
    wrapped = get_peft_model(model, LoraConfig(r=3, lora_alpha=7, target_modules=["q_proj", "up_proj"]))
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    wrapped.peft_config["default"].base_model_name_or_path = str(root / "whole")
    wrapped.save_pretrained(str(root))


LAYOUTS: dict[str, tuple[str, Callable[[Path, PreTrainedModel], object]]] = {
    "zero3": ("llama", zero3),
    "neox": ("gpt_neox", gpt_neox),
    "dcp": ("llama", distributed),
    "zero1": ("llama", modules),
    "tensor-parallel": ("llama", lambda root, model: modules(root, model, 2)),
    "universal": ("llama", universal),
    "adapter": ("llama", adapter),
    "pipeline": ("llama", pipeline),
    "experts one by one": ("mixtral", lambda root, model: model.save_pretrained(root)),
    "megatron": ("llama", lambda root, model: megatron.save_megatron(root, model, megatron.Form(tensor=2, pipeline=2))),
}
"""The family and the writer of each layout."""


def begun(name: str, root: Path) -> tuple[PreTrainedModel, Path]:
    """The trainer's model, and the configuration of a run of one step that begins with what the trainer left."""
    family, write = LAYOUTS[name]
    model = small(family)
    write(root / "base", model)
    (root / "tokenizer").mkdir()
    tokenizer().save(str(root / "tokenizer" / "tokenizer.json"))
    (root / "rows.txt").write_text("the quick brown fox jumps over the lazy dog. " * 30)
    tree: dict[str, Any] = {
        "model": {"path": str(root / "base")},
        "tokenizer": {"path": str(root / "tokenizer")},
        "data": {"train": str(root / "rows.txt"), "seq_len": 32, "eval_fraction": 0},
        "batch": {"micro": 2, "accumulation": 2},
        "schedule": {"steps": 1, "warmup": 1},
        "log": {"every": 1},
        "run": {"output": str(root / "run"), "device": "cpu", "precision": "fp32"},
    }
    return model, write_config(tree, root / "run.yaml")


def first_rows(path: Path) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Inputs and targets of the first step."""
    config = load_config(path)
    prepared = prepare(config, lambda _: None)
    rows = open_rows(prepared, "train")
    order, share = SampleOrder(rows.num_samples, config.data.seed), Share(0, 1, config.step_samples, 1)
    (batch,) = step_batches(rows, order, share, 0)
    return batch.inputs, batch.targets, (config, prepared)


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> float:
    with torch.inference_mode():
        logits = model(input_ids=inputs, use_cache=False).logits
        return float(nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_first_weights_of_a_run_lose_what_the_trainer_s_own_lose(layout: str, tmp_path: Path) -> None:
    trainer, path = begun(layout, tmp_path)
    inputs, targets, (config, prepared) = first_rows(path)
    initial = InitialModel(config, prepared)
    model = build_empty(initial.hf_config, torch.float32, nullcontext())
    initial.fill(model, lambda _: nullcontext(True))
    assert model.get_input_embeddings().weight.shape == trainer.get_input_embeddings().weight.shape
    assert loss_of(model.eval(), inputs, targets) == pytest.approx(loss_of(trainer.eval(), inputs, targets), abs=1e-5)


@pytest.mark.slow
def test_the_first_step_of_tune_loses_what_the_trainer_s_own_model_loses(tmp_path: Path) -> None:
    for layout in ("zero3", "neox", "dcp", "adapter"):
        (tmp_path / layout).mkdir()
        trainer, path = begun(layout, tmp_path / layout)
        inputs, targets, _ = first_rows(path)
        done = run_command("tune", path)
        assert done.returncode == 0, done.stderr
        expected = loss_of(trainer.eval(), inputs, targets)
        assert losses_of(tmp_path / layout / "run") == {1: pytest.approx(expected, abs=1e-5)}
        print(layout, losses_of(tmp_path / layout / "run")[1] - expected)
