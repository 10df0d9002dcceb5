"""One rank's model in this process: the same numbers as transformers', by the shorter way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from serve.config import CacheConfig, ModelConfig, ServerConfig
from serve.model.attention import StepLayout
from serve.model.families import FAMILIES
from serve.worker.loader import RankModel, Stopwatch, load_rank
from serve.worker.parallel import Ranks
from tests.support.kernels import cpu_kernels
from tests.support.models import VOCABULARY, save

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    "gpt_neox sequential": ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    "gpt_neox, a head of 20": ("gpt_neox", {"hidden_size": 80}),
    "gpt_neox, quick_gelu": ("gpt_neox", {"hidden_act": "quick_gelu"}),
    "gpt2, relu": ("gpt2", {"activation_function": "relu"}),
    "phi, normed queries": ("phi", {"qk_layernorm": True}),
    "llama, yarn": (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}},
    ),
}
VARIANTS |= {
    "llama, llama3 angles": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "llama, dynamic angles": (
        "llama",
        {"max_position_embeddings": 256, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "phi3, long angles": (
        "phi3",
        {
            "max_position_embeddings": 2048,
            "original_max_position_embeddings": 256,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0 + place / 8 for place in range(8)],
                "long_factor": [4.0 + place for place in range(8)],
                "original_max_position_embeddings": 256,
            },
        },
    ),
    "gpt2, a scale for each layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True}),
    "opt, norms behind and projections": (
        "opt",
        {"do_layer_norm_before": False, "word_embed_proj_dim": 24, "_remove_final_layer_norm": False},
    ),
    "stablelm, normed queries": ("stablelm", {"qk_layernorm": True}),
    "stablelm, parallel": ("stablelm", {"use_parallel_residual": True}),
    "phi3, a part of each head": ("phi3", {"partial_rotary_factor": 0.5}),
    "gpt_bigcode, as many keys": ("gpt_bigcode", {"multi_query": False, "scale_attn_weights": False}),
    "falcon, grouped": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon, biased": ("falcon", {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}),
}
LENGTH = 50


def load(path: Path) -> RankModel:
    config = ServerConfig(
        model=ModelConfig(path=str(path), dtype="float32", device="cpu", max_model_len=512),
        cache=CacheConfig(kv_cache_gib=0.01, block_tokens=16),
    )
    model, _ = load_rank(config, 0, torch.device("cpu"), lambda: Ranks(0, 1), Stopwatch())
    return model


def layout(begin: int, end: int) -> StepLayout:
    """Positions [begin, end) of one sequence, whose blocks do not lie in order."""
    blocks = [5, 2, 7, 3]
    return StepLayout(
        slots=torch.tensor([blocks[p // 16] * 16 + p % 16 for p in range(begin, end)]),
        positions=torch.arange(begin, end, dtype=torch.int32),
        query_starts=(0, end - begin),
        context_lengths=(end,),
        block_tables=torch.tensor([blocks], dtype=torch.int32),
        table_rows=(0,),
    )


@torch.inference_mode()
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers(tmp_path: Path, variant: str) -> None:
    family, changes = VARIANTS[variant]
    path = save(family, tmp_path, with_tokenizer=False, **changes)
    ids = torch.randint(0, VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    # Falcon's eager attention adds its bias twice.
    judge = "sdpa" if family == "falcon" else "eager"
    expected = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=judge)(ids).logits[0]

    model = load(path)
    parts = []
    for begin, end in ((0, 30), (30, 49), (49, 50)):  # a prompt in two chunks, then one token
        model.state.layout = layout(begin, end)
        hidden = model.body(
            input_ids=ids[:, begin:end], position_ids=torch.arange(begin, end)[None], use_cache=False, return_dict=True
        ).last_hidden_state
        parts.append(model.head(hidden)[0])
        assert model.state.rotary is None, "what one layer postponed is not another one's"

    torch.testing.assert_close(torch.cat(parts), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_kernels_take_over_what_lies_next_to_them(tmp_path: Path, family: str) -> None:
    cpu_kernels()
    model = load(save(family, tmp_path, with_tokenizer=False))
    facts = FAMILIES[family]
    parents = [
        model.body.get_submodule(name.rpartition(".")[0])
        for name, _ in model.body.named_modules()
        if name.endswith("." + facts.activated[0])
    ]
    assert len(parents) >= 3 or not facts.activated[0], "one in every layer"
    assert all(isinstance(parent._modules[facts.activated[1]], nn.Identity) for parent in parents)
    attentions = [module for name, module in model.body.named_modules() if name.endswith("." + facts.attention)]
    turned_by_kernels = bool(facts.rotary_function) and not facts.other_angles
    assert all(("forward" in module.__dict__) == (turned_by_kernels or facts.replaces_forward) for module in attentions)
