"""Head sizes that models of the served families have are among those that the Triton kernels are compiled for."""

from __future__ import annotations

from typing import Final

from serve.model.families import FAMILIES
from tests.serve.model.cuda.variants import HEAD_SIZES

KNOWN: Final = {
    "gpt_neox": {
        "EleutherAI/pythia-14m": (128, 4, 32),
        "EleutherAI/pythia-160m": (768, 12, 64),
        "EleutherAI/pythia-1b": (2048, 8, 256),
        "EleutherAI/pythia-1.4b": (2048, 16, 128),
        "EleutherAI/pythia-2.8b": (2560, 32, 80),
        "EleutherAI/pythia-6.9b": (4096, 32, 128),
        "EleutherAI/gpt-neox-20b": (6144, 64, 96),
    },
    "gpt2": {"openai-community/gpt2": (768, 12, 64), "cerebras/Cerebras-GPT-2.7B": (2560, 32, 80)},
    "gpt_bigcode": {"bigcode/starcoder": (6144, 48, 128), "bigcode/gpt_bigcode-santacoder": (2048, 16, 128)},
    "gptj": {"EleutherAI/gpt-j-6b": (4096, 16, 256)},
    "codegen": {
        "Salesforce/codegen-350M-mono": (1024, 16, 64),
        "Salesforce/codegen-2B-mono": (2560, 32, 80),
        "Salesforce/codegen-16B-mono": (6144, 24, 256),
    },
    "gpt_neo": {"EleutherAI/gpt-neo-125m": (768, 12, 64), "EleutherAI/gpt-neo-2.7B": (2560, 20, 128)},
    "opt": {"facebook/opt-125m": (768, 12, 64), "facebook/opt-2.7b": (2560, 32, 80), "facebook/opt-6.7b": (4096, 32, 128)},
    "llama": {"meta-llama/Llama-3.2-1B": (2048, 32, 64), "meta-llama/Llama-3.1-8B": (4096, 32, 128)},
    "mistral": {"mistralai/Mistral-7B-v0.1": (4096, 32, 128)},
    "qwen2": {"Qwen/Qwen2-0.5B": (896, 14, 64), "Qwen/Qwen2-7B": (3584, 28, 128)},
    "qwen3": {"Qwen/Qwen3-0.6B": (None, 16, 128), "Qwen/Qwen3-8B": (4096, 32, 128)},
    "olmo2": {"allenai/OLMo-2-1124-7B": (4096, 32, 128)},
    "stablelm": {
        "stabilityai/stablelm-2-1_6b": (2048, 32, 64),
        "stabilityai/stablelm-3b-4e1t": (2560, 32, 80),
        "stabilityai/stablelm-2-12b": (5120, 32, 160),
    },
    "gemma2": {"google/gemma-2-2b": (None, 8, 256), "google/gemma-2-27b": (None, 32, 128)},
    "mixtral": {"mistralai/Mixtral-8x7B-v0.1": (4096, 32, 128)},
    "gpt_oss": {"openai/gpt-oss-20b": (None, 64, 64)},
    "phi": {"microsoft/phi-1_5": (2048, 32, 64), "microsoft/phi-2": (2560, 32, 80)},
    "phi3": {"microsoft/Phi-3-mini-4k-instruct": (3072, 32, 96), "microsoft/phi-4": (5120, 40, 128)},
    "bloom": {
        "bigscience/bloom-560m": (1024, 16, 64),
        "bigscience/bloom-1b1": (1536, 16, 96),
        "bigscience/bloom-3b": (2560, 32, 80),
        "bigscience/bloom": (14336, 112, 128),
    },
    "falcon": {"tiiuae/falcon-7b": (4544, 71, 64), "tiiuae/falcon-11B": (4096, 32, 128)},
}
"""By family and name on the hub: hidden size, query heads and head size, as ``config.json`` there has them; ``None``: a head's
size is set for itself."""


def test_every_served_family_is_in_the_table() -> None:
    assert KNOWN.keys() == FAMILIES.keys()


def test_the_table_is_right_in_itself() -> None:
    for models in KNOWN.values():
        for name, (hidden, heads, head_dim) in models.items():
            assert hidden is None or hidden == heads * head_dim, name


def test_known_models_head_sizes_are_compiled_for_and_no_other_but_the_least() -> None:
    """8 is what the tests' own models have."""
    found = {head_dim for models in KNOWN.values() for _, _, head_dim in models.values()}
    assert {8} | found == set(HEAD_SIZES)
