"""Tiny models of every family with random seeded weights, saved as transformers saves them."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from checkpoint import CheckpointWriter

FAMILIES = ("gpt_neox", "gpt2", "gptj", "gpt_neo", "opt", "llama", "mistral", "qwen2", "phi")
MORE_FAMILIES = (
    "qwen3", "stablelm", "olmo2", "phi3", "codegen", "gpt_bigcode", "falcon", "bloom", "gemma2", "mixtral", "gpt_oss",
)  # fmt: skip
"""Served too; of these norms are spread as well, so that a norm cut wrongly is seen."""
VOCABULARY = 509
"""Odd, so that a vocabulary cut over two ranks is uneven."""


class _Maker(Protocol):
    """What we call of ``AutoModelForCausalLM``, which has no types."""

    def from_config(self, config: PretrainedConfig, *, dtype: torch.dtype) -> PreTrainedModel: ...


_MAKER: Final[_Maker] = AutoModelForCausalLM
_COMMON: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
_LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 120,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
SMALL: dict[str, dict[str, Any]] = {
    "gpt_neox": {
        "hidden_size": 64,
        "intermediate_size": 168,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "rotary_pct": 0.25,
        "max_position_embeddings": 512,
    },
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512},
    "gptj": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512, "rotary_dim": 8, "tie_word_embeddings": False},
    "gpt_neo": {
        "hidden_size": 64,
        "num_layers": 4,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 2]],
        "window_size": 24,
        "max_position_embeddings": 512,
    },
    "opt": {
        "hidden_size": 64,
        "ffn_dim": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "word_embed_proj_dim": 64,
    },
    "llama": _LLAMA,
    "mistral": {**_LLAMA, "sliding_window": 40},
    "qwen2": _LLAMA,
    "phi": {
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 512,
    },
    "qwen3": {**_LLAMA, "head_dim": 24},
    "stablelm": {**_LLAMA, "partial_rotary_factor": 0.25, "use_qkv_bias": True},
    "olmo2": _LLAMA,
    "phi3": {**_LLAMA, "sliding_window": 40},
    "codegen": {"n_embd": 64, "n_layer": 3, "n_head": 8, "n_positions": 512, "rotary_dim": 4},
    "gpt_bigcode": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512, "multi_query": True},
    "falcon": {
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "multi_query": True,
    },
    "bloom": {"hidden_size": 64, "n_layer": 3, "n_head": 4},
    "mixtral": {**_LLAMA, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 40},
    "gpt_oss": {**_LLAMA, "head_dim": 24, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 40},
    "gemma2": {
        **_LLAMA,
        "head_dim": 24,
        "sliding_window": 40,
        "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
}


def build(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A small model in fp32; weights and biases are spread wide enough that greedy choices are well apart."""
    options = {**_COMMON, **SMALL[family], **changes}
    if family == "opt":
        options["pad_token_id"] = 1
    config = CONFIG_MAPPING[family](**options)
    torch.manual_seed(seed)
    model = _MAKER.from_config(config, dtype=torch.float32)
    nn.Module.eval(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and "norm" not in name and "ln_" not in name:
                parameter.normal_(0.0, 0.1)
            elif parameter.ndim == 1 and family in MORE_FAMILIES:
                parameter.add_(torch.randn(parameter.shape) * 0.2)
            elif parameter.ndim > 1:
                parameter.normal_(0.0, 0.12)
    return model


@cache
def tokenizer(vocabulary: int = VOCABULARY) -> Tokenizer:
    """A byte-level BPE over a little text; id 0 is ``<|endoftext|>``."""
    text = [
        "def read_config(path):\n    return open(path).read()\n",
        "the quick brown fox jumps over the lazy dog. " * 3,
        "naïve café 日本語 🙂",
    ]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        text,
        trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=["<|endoftext|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return bpe


def save(
    family: str, folder: Path, *, seed: int = 0, with_tokenizer: bool = True, max_shard_size: str = "5GB", **changes: Any
) -> Path:
    """Save ``build``'s model into a folder, and a tokenizer beside it."""
    build(family, seed, **changes).save_pretrained(folder, max_shard_size=max_shard_size)
    if with_tokenizer:
        made = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers leaves it unannotated
            tokenizer_object=tokenizer(), eos_token="<|endoftext|>", bos_token="<|endoftext|>"
        )
        made.save_pretrained(folder)
    return folder


def save_gpt_oss(folder: Path, seed: int, **changes: Any) -> Path:
    """Save a small GPT-OSS without a tokenizer whose attention sinks, zeros in ``build``'s, are drawn too."""
    save("gpt_oss", folder, seed=seed, with_tokenizer=False, **changes)
    stored = load_file(folder / "model.safetensors")
    draw = torch.Generator().manual_seed(seed)
    for name in [name for name in stored if name.endswith(".sinks")]:
        stored[name] = torch.randn(stored[name].shape, generator=draw) + 2
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def save_step(root: Path, step: int, family: str, source: Path, *, seed: int = 0, nan: str = "", **config: int) -> Path:
    """Save ``build``'s model as the checkpoint of this step below ``root``, as a run does.

    Args:
        source: a folder that is made, of the same model as transformers saves it.
        nan: the name of a tensor of which one number is none; empty for none.
        config: what the checkpoint's ``config.json`` says otherwise.
    """
    save(family, source, seed=seed)
    said = json.loads((source / "config.json").read_text()) | config
    tokenizer = [path for path in source.iterdir() if path.name.startswith("tokenizer")]
    with CheckpointWriter(root, step=step, config=said, tokenizer_files=tokenizer) as writer:
        for name, tensor in load_file(source / "model.safetensors").items():
            if name == nan:
                tensor.view(-1)[5] = math.nan
            writer.add(name, tensor)
    return root / f"step-{step:08d}"
