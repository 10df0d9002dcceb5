"""Runs drawn at random: shapes that nobody tuned the forecast to."""

from __future__ import annotations

import random
from typing import Any, Final

Tree = dict[str, Any]
"""A run's file: sections of keys."""

_MOST_WEIGHTS: Final = 40e6
_FEWEST_WEIGHTS: Final = 8e6
_MOST_OPERATIONS: Final = 2e11
"""Of one micro-batch, so that a step takes seconds on two cores."""
_MOST_SQUARES: Final = 400e6
"""Bytes of one layer's attention scores, which a model with dropout holds whole on a CPU."""


def draw_run(seed: int, number: int) -> tuple[str, Tree]:
    """The ``number``-th run of ``seed``: its command, and its file without data and output."""
    draw = random.Random(f"{seed}/{number}")
    while True:
        command, tree = _draw(draw)
        if _is_small(tree):
            return command, tree


def _draw(draw: random.Random) -> tuple[str, Tree]:
    command = draw.choices(("tune", "pretrain"), (4, 1))[0]
    ranks = draw.choices((1, 2), (1, 2))[0]
    vocab = round(1100 * 2 ** draw.uniform(0, 5)) // 64 * 64
    tree: Tree = {
        "model": {"new": _model(draw, vocab, pretrain=command == "pretrain")},
        "data": {"seq_len": draw.choice((96, 160, 256, 384, 640, 1024, 1536)), "packing": draw.choice(("join", "isolate"))},
        "batch": {"micro": draw.choice((1, 2, 3, 4, 6)), "accumulation": draw.choices((1, 2, 3), (3, 1, 1))[0]},
        "activations": {"loss_rows": draw.choices((None, 0), (2, 1))[0]},
        "run": {"ranks": ranks, "precision": draw.choices(("fp32", "bf16"), (3, 2))[0]},
    }
    if command == "pretrain":
        tree["zero"] = {"stage": draw.choice((0, 1))}
        tree["pipeline"] = {"stages": draw.choice([stages for stages in (1, 2) if ranks % stages == 0])}
        tree["activations"]["checkpoint"] = "device" if draw.random() < 0.25 else "none"
        return command, tree
    stage = draw.choice((1, 2, 3))
    tree["zero"] = {"stage": stage}
    offloaded = draw.random() < 0.35
    tree["offload"] = {
        "optimizer": "cpu" if offloaded else "none",
        "parameters": "cpu" if offloaded and stage == 3 and draw.random() < 0.7 else "none",
    }
    tree["activations"]["checkpoint"] = draw.choices(("none", "device"), (3, 1))[0]
    return command, tree


def _model(draw: random.Random, vocab: int, *, pretrain: bool) -> Tree:
    families = ("gpt_neox", "gpt2", "llama") if pretrain else ("gpt_neox", "gpt2", "llama", "qwen2", "mistral", "opt", "phi")
    family = draw.choice(families)
    heads, size, layers = draw.choice((4, 6, 8, 12)), draw.choice((32, 48, 64, 80)), draw.randint(2, 14)
    hidden, tied = heads * size, draw.random() < 0.4
    inner = round(hidden * draw.uniform(2, 4.5)) // 32 * 32
    if family == "gpt2":
        dropped = draw.choice((0.0, 0.1))
        drops = {"attn_pdrop": dropped, "embd_pdrop": dropped, "resid_pdrop": dropped}
        return {
            "model_type": family, "n_embd": hidden, "n_layer": layers, "n_head": heads, "n_inner": inner, "vocab_size": vocab,
            **drops,
        }  # fmt: skip
    model: Tree = {
        "model_type": family, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "vocab_size": vocab, "tie_word_embeddings": tied,
    }  # fmt: skip
    if family == "opt":
        return {**model, "ffn_dim": inner, "word_embed_proj_dim": hidden, "dropout": draw.choice((0.0, 0.1))}
    model["intermediate_size"] = inner
    if family in ("llama", "qwen2", "mistral"):
        model["num_key_value_heads"] = draw.choice([count for count in (1, 2, 3, 4, heads) if heads % count == 0])
    if family in ("llama", "mistral"):
        model["head_dim"] = size
    return model


def _is_small(tree: Tree) -> bool:
    """Whether it trains in seconds, and is still more than its libraries."""
    model = tree["model"]["new"]
    hidden = model.get("hidden_size") or model["n_embd"]
    layers = model.get("num_hidden_layers") or model["n_layer"]
    heads = model.get("num_attention_heads") or model["n_head"]
    inner = model.get("intermediate_size") or model.get("ffn_dim") or model["n_inner"]
    gated = model["model_type"] in ("llama", "qwen2", "mistral")
    weights: int = layers * hidden * (4 * hidden + (3 if gated else 2) * inner) + hidden * model["vocab_size"]
    micro, length = tree["batch"]["micro"], tree["data"]["seq_len"]
    tokens = micro * length
    squares: float = 4.0 * micro * heads * length**2
    operations: float = 6.0 * weights * tokens + 12.0 * layers * hidden * length * tokens
    if layers * squares > 8 * _MOST_SQUARES or squares > _MOST_SQUARES:
        return False
    return _FEWEST_WEIGHTS <= weights <= _MOST_WEIGHTS and 3e10 <= operations <= _MOST_OPERATIONS
