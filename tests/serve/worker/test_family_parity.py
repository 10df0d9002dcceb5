"""Every family gives transformers' own tokens, on one rank and on several: heads shared evenly, unevenly, and repeated."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from serve.worker.parallel import Ranks
from serve.worker.rank_process import rank_environment
from serve.worker.runner import Runner
from tests.serve.worker.family_worker import NEW_TOKENS, PROMPTS, VERDICTS, VERIFIED, generate, load, logits
from tests.serve.worker.test_loader import VARIANTS
from tests.support import reference, warm
from tests.support.models import SMALL, save
from tests.support.mxfp4 import in_four_bits

UNEVEN: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_neox of 3 heads": ("gpt_neox", {"hidden_size": 48, "num_attention_heads": 3, "intermediate_size": 84}),
    "gpt2 of 3 heads": ("gpt2", {"n_embd": 48, "n_head": 3}),
    "gptj of 3 heads": ("gptj", {"n_embd": 48, "n_head": 3}),
    "gpt_neo of 3 heads": ("gpt_neo", {"hidden_size": 48, "num_heads": 3}),
    "opt of 3 heads": ("opt", {"hidden_size": 48, "num_attention_heads": 3, "word_embed_proj_dim": 48}),
    "phi of 3 heads": ("phi", {"hidden_size": 48, "num_attention_heads": 3}),
    "bloom of 3 heads": ("bloom", {"hidden_size": 48, "n_head": 3}),
    "llama of 3 shared heads": ("llama", {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}),
    "llama of 1 shared head": ("llama", {"num_key_value_heads": 1}),
    "olmo2 of 1 shared head": ("olmo2", {"num_key_value_heads": 1}),
    "stablelm of 3 normed heads": (
        "stablelm",
        {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "qk_layernorm": True},
    ),
    "mixtral of all experts": ("mixtral", {"num_experts_per_tok": 5}),
    "gpt_oss of all experts": ("gpt_oss", {"num_experts_per_tok": 5}),
    "phi3 of 3 shared heads": ("phi3", {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}),
    "phi3 of 1 shared head": ("phi3", {"num_key_value_heads": 1}),
    "falcon of 7 heads": ("falcon", {"hidden_size": 56, "num_attention_heads": 7}),
    "falcon of 3 groups": (
        "falcon",
        {"hidden_size": 96, "num_attention_heads": 6, "num_kv_heads": 3, "new_decoder_architecture": True},
    ),
}
FOUR_BITS = "gpt_oss in four bits"
_LAYERS = ("num_hidden_layers", "n_layer")
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    name: (family, {**changes, **{key: 2 for key in _LAYERS if key in SMALL[family]}})
    for name, (family, changes) in (VARIANTS | UNEVEN | {FOUR_BITS: ("gpt_oss", {"intermediate_size": 96})}).items()
}
ALL = tuple(CASES)
EACH_WAY = (
    "codegen", "phi3", "gpt_bigcode", "falcon, grouped", "bloom", "gemma2", "olmo2 of 1 shared head",
    "stablelm of 3 normed heads", "mixtral", "gpt_oss", FOUR_BITS,
    "llama, dynamic angles", "qwen3", "mixtral of all experts", "gpt_oss of all experts",
)  # fmt: skip
"""One of each way to be cut; all the others are among the slow tests."""
OTHERS = tuple(name for name in ALL if name not in EACH_WAY)
ROUTED = {"mixtral", "gpt_oss", FOUR_BITS}
"""In bf16, rounding lets some tokens choose another expert, here and in transformers: then numbers say nothing."""
WORSE = 1.5
"""How many times as far from the logits in fp32 as transformers' own in bf16 ours may be. Seen: up to
1.02 on one rank, up to 1.21 on two and on four."""
REFUSED = {
    4: {"gpt_neox of 3 heads", "gpt2 of 3 heads", "gptj of 3 heads", "gpt_neo of 3 heads", "opt of 3 heads", "phi of 3 heads"}
    | {"bloom of 3 heads", "llama of 3 shared heads", "stablelm of 3 normed heads", "phi3 of 3 shared heads"}
    | {"falcon of 3 groups", "falcon, grouped", "codegen"}
}


Judge = Callable[[tuple[str, ...]], "Judged"]
SLOW = (
    pytest.param(EACH_WAY, id="each way", marks=pytest.mark.slow),
    pytest.param(OTHERS, id="others", marks=pytest.mark.slow),
)
QUICK = (pytest.param(EACH_WAY, id="each way"), SLOW[1])
"""Both are all of them, and each is saved, judged and served for itself alone."""


def folder_of(name: str) -> str:
    return name.replace(" ", "_").replace(",", "")


@dataclass(frozen=True)
class Judged:
    """Checkpoints, and transformers' own tokens for each."""

    root: Path
    tokens: dict[str, list[list[int]]]
    logits: dict[str, tuple[torch.Tensor, torch.Tensor]]
    """Of the first prompt, with weights in bf16: computed in fp32, and in bf16."""

    def further(self, got: dict[str, torch.Tensor]) -> dict[str, float]:
        """Models whose logits in bf16 are further from those in fp32 than rounding explains, and how many times as far as
        transformers' are."""
        ratios = {}
        for name, (exact, theirs) in self.logits.items():
            if name not in ROUTED and folder_of(name) in got:
                ratios[name] = float((got[folder_of(name)] - exact).norm() / (theirs - exact).norm())
        assert ratios, "something is compared"
        return {name: ratio for name, ratio in ratios.items() if not ratio <= WORSE}


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Judge:
    """What judges models of these names, made once."""
    torch.set_num_threads(1)

    @cache
    def judged(names: tuple[str, ...]) -> Judged:
        root, answers, exact_and_theirs = tmp_path_factory.mktemp("families"), {}, {}
        for name in names:
            family, changes = CASES[name]
            folder = save(family, root / folder_of(name), with_tokenizer=False, **changes)
            if name == FOUR_BITS:
                folder = in_four_bits(folder, tmp_path_factory.mktemp("decoded"))
            model = reference.load(folder)
            answers[name] = [reference.greedy(model, prompt, NEW_TOKENS) for prompt in PROMPTS]
            exact_and_theirs[name] = reference.in_bf16(folder, PROMPTS[0])
        return Judged(root, answers, exact_and_theirs)

    return judged


def by_ranks(root: Path, size: int, stages: int = 1) -> dict[str, Any]:
    """What a group of ranks generates from each checkpoint, or why it does not."""
    count, words = size * stages, [str(size), str(root), str(stages)]
    ranks = [
        warm.start("tests.serve.worker.family_worker", [str(rank), *words], rank_environment(rank, count, "cpu"))
        for rank in range(count)
    ]
    said = warm.all_ended(ranks, 600.0)
    assert [rank.returncode for rank in ranks] == [0] * count, said
    answers: dict[str, Any] = json.loads((root / f"tokens-{size}x{stages}.json").read_text())
    return answers


@pytest.mark.parametrize("names", SLOW)
def test_one_rank_gives_the_tokens_of_transformers(names: tuple[str, ...], judge: Judge) -> None:
    judged = judge(names)
    ranks = Ranks(0, 1)
    got = {name: generate(Runner(load(judged.root / folder_of(name), 1, ranks), ranks), ranks) for name in judged.tokens}
    assert {name for name in got if got[name] != judged.tokens[name]} == set()


@pytest.mark.parametrize("names", QUICK)
def test_one_rank_in_bf16_is_as_near_to_fp32_as_transformers(names: tuple[str, ...], judge: Judge) -> None:
    judged, ranks, got = judge(names), Ranks(0, 1), {}
    for name in judged.tokens:
        found = logits(load(judged.root / folder_of(name), 1, ranks, "bfloat16"), ranks)
        assert found is not None
        got[folder_of(name)] = found
    assert judged.further(got) == {}


@pytest.mark.parametrize(
    ("names", "size"),
    [
        pytest.param(EACH_WAY, 2, id="each way-2"),
        pytest.param(OTHERS, 2, id="others-2", marks=pytest.mark.slow),
        pytest.param(EACH_WAY, 4, id="each way-4", marks=pytest.mark.slow),
        pytest.param(OTHERS, 4, id="others-4", marks=pytest.mark.slow),
    ],
)
def test_several_ranks_give_the_tokens_of_transformers(names: tuple[str, ...], size: int, judge: Judge) -> None:
    judged = judge(names)
    got = by_ranks(judged.root, size)
    refused = {name for name in judged.tokens if isinstance(got[folder_of(name)], str)}
    assert refused == REFUSED.get(size, set()) & judged.tokens.keys(), {name: got[folder_of(name)] for name in refused}
    if VERIFIED in names:
        same, different = got[VERDICTS]
        assert same == "the same"
        assert "first after layers.1;" in different, "what one rank has wrong is told by its layer"
    assert {name for name in judged.tokens if name not in refused and got[folder_of(name)] != judged.tokens[name]} == set()
    assert judged.further(torch.load(judged.root / f"logits-{size}x1.pt")) == {}, "in bf16, too"


@pytest.mark.parametrize("names", SLOW)
def test_two_stages_of_two_ranks_give_the_tokens_of_transformers(names: tuple[str, ...], judge: Judge) -> None:
    judged = judge(names)
    got = by_ranks(judged.root, 2, 2)
    assert {name for name in judged.tokens if got[folder_of(name)] != judged.tokens[name]} == set()
    assert judged.further(torch.load(judged.root / "logits-2x2.pt")) == {}, "in bf16, too"
