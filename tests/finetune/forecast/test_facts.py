"""What is counted of a model and of one micro-batch without its weights."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from finetune.config import ActivationConfig, BatchConfig, LoraConfig, ModelConfig, OffloadConfig, ZeroConfig
from finetune.errors import ConfigError
from finetune.forecast import facts as facts_module
from finetune.forecast.estimate import model_config_of
from finetune.forecast.facts import facts_of
from finetune.model import fused_loss
from finetune.model.build import build_empty
from finetune.model.loss import token_losses
from tests.finetune.forecast.support import NEW, config_of
from tests.finetune.stand_ins import CountedLiger


@pytest.mark.parametrize("model_type", ["gpt_neox", "gpt2", "llama", "gpt_neo", "opt"])
def test_parameters_are_counted_as_transformers_builds_them(model_type: str) -> None:
    new: dict[str, Any] = {"model_type": model_type, "vocab_size": 512}
    config = config_of(new=new | ({} if model_type != "gpt_neox" else NEW))
    hf_config = model_config_of(config)
    for key, value in (("num_hidden_layers", 2), ("hidden_size", 64), ("num_attention_heads", 4)):
        if model_type not in ("gpt_neo",):
            setattr(hf_config, key, value)
    if model_type == "opt":
        hf_config.word_embed_proj_dim, hf_config.ffn_dim = 64, 96
    if model_type == "llama":
        hf_config.num_key_value_heads, hf_config.head_dim = 4, 16
    facts = facts_of(config, hf_config, "fp32", on_gpu=False)
    with torch.device("meta"):
        model = build_empty(hf_config, torch.float32, nullcontext())
    assert facts.total == facts.trained == sum(p.numel() for p in model.parameters())
    assert facts.largest == max(p.numel() for p in model.parameters())


def test_activations_are_what_autograd_really_saves() -> None:
    config = config_of()
    hf_config = model_config_of(config)
    facts = facts_of(config, hf_config, "fp32", on_gpu=False)
    model = build_empty(hf_config, torch.float32, nullcontext()).train()
    owned = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.zeros(2, 48, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = token_losses(model(input_ids=ids, use_cache=False).logits, ids)
    assert loss.requires_grad
    total = sum(saved.values())
    logits = 2 * 48 * 512 * 4
    assert total <= facts.activation_bytes <= total + 2.5 * logits, "what is saved, and the temporaries of the loss beside it"


def test_activations_grow_with_the_batch_and_shrink_in_bf16() -> None:
    def activations(micro: int, precision: str) -> int:
        config = config_of(batch=BatchConfig(micro=micro))
        return facts_of(config, model_config_of(config), precision, on_gpu=False).activation_bytes

    assert activations(4, "fp32") == pytest.approx(2 * activations(2, "fp32"), rel=0.1)
    assert activations(4, "bf16") < 0.8 * activations(4, "fp32")


def test_adapters_and_recomputed_blocks_are_followed_as_they_are() -> None:
    plain = config_of()
    hf_config = model_config_of(plain)
    whole = facts_of(plain, hf_config, "fp32", on_gpu=False)
    adapted = dataclasses.replace(plain, model=ModelConfig(path="x"), lora=LoraConfig(rank=4, method="dora"))
    facts = facts_of(adapted, hf_config, "fp32", on_gpu=False)
    ranks = 3 * 4 * ((64 + 192) + (64 + 64) + 2 * (64 + 160))
    assert facts.frozen == whole.total
    assert facts.trained == ranks + 3 * (192 + 64 + 160 + 64), "two factors and a magnitude for each linear layer"
    recomputed = dataclasses.replace(plain, activations=ActivationConfig(checkpoint="device"))
    facts = facts_of(recomputed, hf_config, "fp32", on_gpu=False)
    assert facts.total == whole.total
    assert facts.activation_bytes < 0.6 * whole.activation_bytes
    assert facts.saved_inputs_bytes == 3 * 2 * 48 * 64 * 4


def test_a_chunked_loss_takes_less_than_whole_logits() -> None:
    def activations(rows: int | None) -> int:
        config = dataclasses.replace(config_of(new={**NEW, "vocab_size": 8192}), activations=ActivationConfig(loss_rows=rows))
        return facts_of(config, model_config_of(config), "fp32", on_gpu=False).activation_bytes

    assert activations(None) < 0.7 * activations(0)


@pytest.mark.parametrize(("on_gpu", "product"), [(False, 2 << 20), (True, 5 << 20)])
def test_a_heads_gradient_of_16_bits_is_multiplied_in_parts_on_a_cpu(on_gpu: bool, product: int) -> None:
    vocab, hidden = 40960, NEW["hidden_size"]
    config = config_of(new={**NEW, "vocab_size": vocab})
    found = facts_of(config, model_config_of(config), "bf16", on_gpu=on_gpu)
    made = {event.size for event in found.trace}
    assert {4 * vocab * hidden, product} <= made
    assert on_gpu or 2 * product in made, "torch's fp32 copy of a part"
    assert ((2 << 20) in made) is not on_gpu


@pytest.mark.parametrize("packing", ["join", "isolate"])
def test_masks_are_counted_where_samples_are_packed_alone(packing: Any) -> None:
    """A mask is a square for every row and layer; rows of one sample need none, whatever their length."""
    config = config_of()
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, seq_len=640, packing=packing))
    hf_config = model_config_of(config)
    made = facts_of(config, hf_config, "fp32", on_gpu=False).trace
    square = 2 * 640 * 640 * 4
    assert (sum(event.size == square for event in made) > 0) is (packing == "isolate")


def test_attention_by_lengths_is_counted_without_masks() -> None:
    """Where a GPU computes it, unless a mask is asked for; ``pretrain`` always makes one."""
    config = config_of()
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, seq_len=640, packing="isolate"))
    hf_config = model_config_of(config)

    def squares(wanted: Any, precision: str = "bf16", *, on_gpu: bool = True, command: str = "tune") -> bool:
        asked = dataclasses.replace(config, activations=ActivationConfig(packed_attention=wanted))
        made = facts_of(asked, hf_config, precision, on_gpu=on_gpu, command=command).trace
        return any(event.size in (width * 2 * 640 * 640 for width in (1, 2, 4)) for event in made)

    assert not squares("auto")
    assert not squares("varlen")
    assert squares("mask")
    assert squares("auto", "fp32")
    assert squares("auto", on_gpu=False)
    assert squares("auto", command="pretrain")
    with pytest.raises(ConfigError, match=r"activations\.packed_attention is varlen; it is for GPUs"):
        squares("varlen", on_gpu=False)


def test_the_fused_loss_is_counted_with_the_rows_that_its_library_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_loss, "liger_loss", CountedLiger)
    new = {**NEW, "vocab_size": 8192}
    found = []
    for activations in (ActivationConfig(loss="fused"), ActivationConfig(loss_rows=1), ActivationConfig(loss_rows=0)):
        config = dataclasses.replace(config_of(new=new), activations=activations)
        found.append(facts_of(config, model_config_of(config), "bf16", on_gpu=True).activation_bytes)
    assert found[0] == found[1], "a vocabulary 128 times the hidden size: one of 96 rows"
    assert found[0] < found[2]
    config = dataclasses.replace(config_of(new=new), activations=ActivationConfig(loss="fused"))
    with pytest.raises(ConfigError, match=r"activations\.loss is fused; liger-kernel's is for GPUs"):
        facts_of(config, model_config_of(config), "bf16", on_gpu=False)


def test_model_flops_are_six_a_weight_and_the_attention() -> None:
    config = config_of()
    facts = facts_of(config, model_config_of(config), "fp32", on_gpu=False)
    blocks = 3 * (64 * 192 + 64 * 64 + 2 * 64 * 160)
    assert facts.multiplied == blocks + 64 * 512, "the output layer multiplies, the embedding is looked up"
    assert facts.flops_per_token(48) == 6 * facts.multiplied + 12 * 3 * 64 * 48


def test_a_micro_batch_is_followed_once_wherever_its_states_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    really = facts_module.follow
    monkeypatch.setattr(facts_module, "_followed_before", {})
    monkeypatch.setattr(facts_module, "follow", lambda *args, **named: seen.append("followed") or really(*args, **named))
    config = config_of(zero=ZeroConfig(stage=1))
    first = facts_of(config, model_config_of(config), "fp32", on_gpu=False)
    elsewhere = dataclasses.replace(config, zero=ZeroConfig(stage=3), offload=OffloadConfig(optimizer="cpu"))
    again = facts_of(elsewhere, model_config_of(elsewhere), "fp32", on_gpu=False)
    assert seen == ["followed"]
    assert (again.trace, again.work) == (first.trace, first.work)

    others = [
        dataclasses.replace(config, batch=BatchConfig(micro=1)),
        dataclasses.replace(config, activations=ActivationConfig(checkpoint="device")),
        dataclasses.replace(config, activations=ActivationConfig(loss_rows=8)),
        dataclasses.replace(config, data=dataclasses.replace(config.data, seq_len=24)),
        config_of(zero=ZeroConfig(stage=1), new=NEW | {"num_hidden_layers": 1}),
    ]
    for other in others:
        assert facts_of(other, model_config_of(other), "fp32", on_gpu=False).trace != first.trace
    assert facts_of(config, model_config_of(config), "bf16", on_gpu=False).trace != first.trace
    assert len(seen) == len(others) + 2
