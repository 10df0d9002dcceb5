"""Packed samples do not see each other, in any family: their loss and gradients are those of the samples one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from finetune.data.batches import Microbatch
from finetune.errors import ConfigError
from finetune.model.isolation import BY_MASK, BY_POSITIONS, check_isolation, forward_inputs, mask_of, positions_of
from finetune.model.loss import token_losses

LENGTH, WINDOW = 48, 5
ROWS = ([11, 1, 7, 20], [3, 1, 16])
"""Lengths of the samples in two rows; the rest is padding. Longer than the windows, which must slide inside a sample."""

COMMON = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,  # attention that matters: a leak must show
}
GROUPED = {**COMMON, "num_key_value_heads": 2, "head_dim": 8}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.3}
NEO = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 64, "initializer_range": 0.3}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt_neox": COMMON,
    "gpt2": GPT2,
    "gptj": {**GPT2, "rotary_dim": 4},
    "gpt_neo": {**NEO, "attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
    "opt": {**COMMON, "ffn_dim": 64, "word_embed_proj_dim": 32, "init_std": 0.3},
    "llama": GROUPED,
    "mistral": {**GROUPED, "sliding_window": WINDOW},
    "qwen2": {**GROUPED, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "phi": COMMON,
    "qwen3": GROUPED,
    "gemma2": {**GROUPED, "sliding_window": WINDOW},
    "olmo2": COMMON,
    "phi3": COMMON,
    "stablelm": GROUPED,
    "starcoder2": {**GROUPED, "sliding_window": WINDOW},
}


def tiny(family: str, **more: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    settings = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, **FAMILIES[family]}
    config = AutoConfig.for_model(family, **settings)
    for name, value in vars(config).items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    return AutoModelForCausalLM.from_config(config, **more).train()


def packed() -> tuple[Microbatch, list[Microbatch]]:
    """Two rows of samples, and the same samples one by one."""
    torch.manual_seed(1)
    inputs, targets = torch.randint(0, 50, (2, LENGTH)), torch.randint(0, 50, (2, LENGTH))
    segments = torch.zeros(2, LENGTH, dtype=torch.int64)
    targets[torch.rand(2, LENGTH) < 0.3] = -100
    single = []
    for row, lengths in enumerate(ROWS):
        at = 0
        for number, length in enumerate([*lengths, LENGTH - sum(lengths)]):
            here = slice(at, at + length)
            segments[row, here] = number
            if number == len(lengths):
                targets[row, here] = -100
            else:
                single.append(Microbatch(inputs[row : row + 1, here], targets[row : row + 1, here]))
            at += length
    return Microbatch(inputs, targets, segments), single


def loss_of(model: PreTrainedModel, batch: Microbatch) -> torch.Tensor:
    return token_losses(model(**forward_inputs(batch, model.config, torch.device("cpu"))).logits, batch.targets)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_the_packed_loss_is_that_of_the_samples_one_by_one(family: str) -> None:
    batch, single = packed()
    for more in ({}, {"attn_implementation": "eager"}):
        model = tiny(family, **more)
        with torch.no_grad():
            together = float(loss_of(model, batch))
            alone = sum(float(loss_of(model, sample)) for sample in single)
            leaking = float(loss_of(model, Microbatch(batch.inputs, batch.targets)))
        assert together == pytest.approx(alone, rel=1e-6)
        assert leaking != pytest.approx(alone, rel=1e-3), "this model would not notice a leak"


@pytest.mark.parametrize("family", ["gpt_neox", "opt"])
def test_the_packed_gradient_is_that_of_the_samples_one_by_one(family: str) -> None:
    batch, single = packed()
    model = tiny(family)
    loss_of(model, batch).backward()
    together = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    for sample in single:
        loss_of(model, sample).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert torch.allclose(together[name], parameter.grad, rtol=1e-4, atol=1e-4), name


def test_every_family_that_may_be_packed_is_tested_here() -> None:
    assert set(FAMILIES) == BY_POSITIONS | BY_MASK


def test_other_families_are_refused_with_a_way_out() -> None:
    config = AutoConfig.for_model("bloom")
    check_isolation(config, "none")
    check_isolation(config, "join")
    with pytest.raises(ConfigError, match=r"data\.packing: isolate .* for bloom .* set data\.packing to none"):
        check_isolation(config, "isolate")


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_positions_and_mask_follow_from_the_segments(lengths: list[int]) -> None:
    segments = torch.tensor([[number for number, length in enumerate(lengths) for _ in range(length)]])
    assert positions_of(segments)[0].tolist() == [position for length in lengths for position in range(length)]
    mask = mask_of(segments)[0, 0]
    for query in range(sum(lengths)):
        seen = [key for key in range(sum(lengths)) if key <= query and segments[0, key] == segments[0, query]]
        assert mask[query].nonzero().flatten().tolist() == seen
