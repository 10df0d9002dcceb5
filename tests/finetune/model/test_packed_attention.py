"""Samples of packed rows kept apart by their lengths: the same losses and gradients as by a mask, in every family that can."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedModel

from finetune.data.batches import Microbatch
from finetune.errors import ConfigError
from finetune.model import packed_attention
from finetune.model.isolation import BY_MASK, BY_POSITIONS, forward_inputs
from finetune.model.loss import token_losses
from finetune.model.packed_attention import (
    FAMILIES,
    PackedAttention,
    Varlen,
    is_by_length,
    obstacle,
    starts_of,
    varlen_attention,
)
from finetune.model.recompute import recompute_blocks
from tests.finetune.model.test_isolation import LENGTH, loss_of, packed, tiny
from tests.finetune.stand_ins import CountedVarlen

CPU = torch.device("cpu")


def loss_by_length(attention: PackedAttention, model: PreTrainedModel, batch: Microbatch) -> torch.Tensor:
    attention.begin(batch.inputs, batch.segments, CPU)
    return token_losses(model(**forward_inputs(batch, model.config, CPU, masked=False)).logits, batch.targets)


def gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_loss_and_gradient_are_those_of_the_mask_and_of_the_samples_alone(family: str) -> None:
    batch, single = packed()
    model = tiny(family)
    masked = loss_of(model, batch)
    masked.backward()
    wanted = gradients(model)
    alone = sum(float(loss_of(model, sample).detach()) for sample in single)
    varlen = CountedVarlen()
    attention = PackedAttention(model, varlen)
    by_length = loss_by_length(attention, model, batch)
    by_length.backward()
    assert varlen.calls == model.config.num_hidden_layers
    assert float(by_length.detach()) == pytest.approx(float(masked.detach()), rel=1e-6)
    assert float(by_length.detach()) == pytest.approx(alone, rel=1e-6)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-4)


def test_blocks_that_are_computed_again_keep_the_same_samples_apart() -> None:
    batch, _ = packed()
    model = tiny("mistral")
    varlen = CountedVarlen()
    attention = PackedAttention(model, varlen)
    loss_by_length(attention, model, batch).backward()
    wanted, once = gradients(model), varlen.calls
    recompute_blocks(model, "device", pin_memory=False)
    loss_by_length(attention, model, batch).backward()
    assert varlen.calls == 3 * once, "forward, and forward again"
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-5, atol=1e-5)


def test_rows_of_one_sample_are_one_length_each() -> None:
    batch, _ = packed()
    whole = Microbatch(batch.inputs, batch.targets)
    model = tiny("llama")
    expected = float(loss_of(model, whole).detach())
    assert float(loss_by_length(PackedAttention(model, CountedVarlen()), model, whole).detach()) == pytest.approx(
        expected, rel=1e-6
    )


def test_samples_begin_where_their_number_changes_and_where_a_row_does() -> None:
    segments = torch.tensor([[0, 0, 1, 2, 2], [0, 0, 0, 0, 0], [0, 1, 1, 1, 2]])
    starts = starts_of(segments)
    assert starts.tolist() == [0, 2, 3, 5, 10, 11, 14, 15]
    assert starts.dtype == torch.int32


def test_the_families_are_those_that_may_be_packed_and_change_no_scores() -> None:
    assert (BY_POSITIONS | BY_MASK) - {"gptj", "gpt_neo", "gemma2"} == FAMILIES


def test_what_stands_for_the_kernel_takes_what_torchs_takes() -> None:
    """This torch's, whose first seven arguments go by their places."""
    theirs = varlen_attention()
    assert theirs is not None, "torch 2.11 and later"
    names = list(inspect.signature(theirs).parameters)
    for ours in (Varlen.__call__, CountedVarlen.__call__):
        own = list(inspect.signature(ours).parameters)[1:]
        assert own[:7] == names[:7]
        assert set(own) <= set(names)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_torchs_own_takes_what_it_is_given_and_gives_gradients(family: str) -> None:
    """On ``meta``, where it checks its arguments and computes nothing."""
    theirs, meta = varlen_attention(), torch.device("meta")
    assert theirs is not None
    batch, _ = packed()
    model = tiny(family).to(meta, torch.bfloat16)
    model.config.pad_token_id = None  # or transformers would look for it among the ids
    attention = PackedAttention(model, theirs)
    attention.begin(batch.inputs, batch.segments, meta)
    logits = model(**forward_inputs(batch, model.config, meta, masked=False)).logits
    assert logits.shape == (2, LENGTH, 50)
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


SIZES = "it computes multiples of 8 up to 256"
NEOX = {"model_type": "gpt_neox", "hidden_size": 64, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("changes", "device", "precision", "why"),
    [
        ({}, "cpu", "bf16", "it is for GPUs, and this run is on the cpu"),
        ({}, "cuda", "fp32", "it is for bf16 and fp16, and this run is in fp32"),
        ({"model_type": "gptj", "n_embd": 64, "n_head": 4}, "cuda", "bf16", "a gptj model's attention is not computed so"),
        ({"attention_dropout": 0.1}, "cuda", "bf16", "the model's attention_dropout is 0.1, and it drops nothing"),
        ({"model_type": "gpt2"}, "cuda", "bf16", "the model's attn_pdrop is 0.1, and it drops nothing"),
        (
            {"num_attention_heads": 16},
            "cuda",
            "bf16",
            "the model's heads have 4 elements; it computes multiples of 8 up to 256",
        ),
        ({"hidden_size": 2048}, "cuda", "bf16", "the model's heads have 512 elements; it computes multiples of 8 up to 256"),
    ],
)
def test_what_cannot_be_computed_by_length_is_masked_or_refused_by_name(
    changes: dict[str, Any], device: str, precision: str, why: str
) -> None:
    settings = NEOX | changes
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    assert obstacle(config, device, precision) == why
    assert not is_by_length("auto", config, device, precision)
    assert not is_by_length("mask", config, device, precision)
    with pytest.raises(ConfigError, match=rf"^activations.packed_attention is varlen; {why}: choose auto, or mask$"):
        is_by_length("varlen", config, device, precision)


def test_on_a_gpu_in_16_bits_it_is_computed_so_unless_a_mask_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {key: value for key, value in NEOX.items() if key != "model_type"}
    config = AutoConfig.for_model("gpt_neox", **settings)
    assert [is_by_length(wanted, config, "cuda", "bf16") for wanted in ("auto", "varlen", "mask")] == [True, True, False]
    monkeypatch.setattr(packed_attention, "varlen_attention", lambda: None)
    assert not is_by_length("auto", config, "cuda", "bf16")
    with pytest.raises(ConfigError, match=r"is varlen; torch .* has no torch\.nn\.attention\.varlen that does it"):
        is_by_length("varlen", config, "cuda", "bf16")
