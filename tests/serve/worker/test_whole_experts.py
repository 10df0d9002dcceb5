"""Ranks that have some of the experts each, whole, give the tokens of transformers, as those that have a part of each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from checkpoint import open_checkpoint
from serve.config import CacheConfig, ModelConfig, ServerConfig
from serve.errors import ConfigError
from serve.model.experts import only_own
from serve.model.heads import Piece
from serve.worker.loader import survey
from tests.serve.worker.family_worker import BY_TORCH, NEW_TOKENS, PROMPTS, WHOLE
from tests.serve.worker.test_family_parity import by_ranks
from tests.support import reference
from tests.support.models import save
from tests.support.mxfp4 import in_four_bits

CASES = {
    "mixtral": ("mixtral", {}),
    "mixtral-all": ("mixtral", {"num_experts_per_tok": 5}),
    "gpt_oss": ("gpt_oss", {}),
    "gpt_oss-all": ("gpt_oss", {"num_experts_per_tok": 5}),
    "gpt_oss-four-bits": ("gpt_oss", {"intermediate_size": 96}),
}


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_several_ranks_give_the_tokens_of_transformers(size: int, tmp_path: Path) -> None:
    """By kernels, by torch's product over groups of rows, and of numbers that this does not take one after the other."""
    torch.set_num_threads(1)
    root, expected = tmp_path / "models", {}
    root.mkdir()
    for name, (family, changes) in CASES.items():
        for way in ("", BY_TORCH, f"{BY_TORCH}-odd"):
            odd = {"intermediate_size": 42} if way.endswith("odd") else {}
            if odd and "four-bits" in name:
                continue
            folder = root / f"{name}{WHOLE}{way}"
            found = save(family, folder, with_tokenizer=False, num_hidden_layers=2, **{**changes, **odd})
            if "four-bits" in name:
                found = in_four_bits(folder, tmp_path / f"decoded{way}")
            model = reference.load(found)
            model.config._experts_implementation = "eager"  # torch's product over groups does not take the odd ones
            expected[folder.name] = [reference.greedy(model, prompt, NEW_TOKENS) for prompt in PROMPTS]
    got = by_ranks(root, size)
    assert {name: got[name] for name in expected if got[name] != expected[name]} == {}


@pytest.mark.parametrize("skips", [True, False])
def test_what_overflows_in_an_expert_is_of_those_alone_that_were_routed_to_it(skips: bool) -> None:
    """Experts 0 and 1 of four are here, and 0 makes infinity of whatever it is given."""
    made = MixtralExperts(MixtralConfig(hidden_size=8, intermediate_size=8, num_local_experts=2, num_experts_per_tok=2))
    made.config._experts_implementation = "grouped_mm" if skips else "eager"
    made._is_expert_parallel = skips
    for parameter in made.parameters():
        parameter.data = torch.ones_like(parameter)
    made.down_proj.data[0] = float("inf")
    forward = only_own(made.forward, Piece(0, 2), skips=skips)
    experts_TK = torch.tensor([[2, 3], [1, 2], [0, 1], [3, 1]])
    with torch.no_grad():
        out_TH = forward(torch.ones(4, 8), experts_TK, torch.full((4, 2), 0.5))
    assert torch.equal(out_TH[0], torch.zeros(8))
    assert torch.equal(out_TH[1], out_TH[3])
    assert out_TH[1].isfinite().all()
    assert (out_TH[1] > 0).all()
    assert not out_TH[2].isfinite().any()
    assert torch.equal(experts_TK, torch.tensor([[2, 3], [1, 2], [0, 1], [3, 1]])), "others use it, too"


def found(folder: Path, size: int) -> bool:
    config = ServerConfig(
        model=ModelConfig(path=str(folder), device="cpu", tensor_parallel_size=size, experts="whole"),
        cache=CacheConfig(kv_cache_gib=0.01),
    )
    with open_checkpoint(folder) as checkpoint:
        return survey(checkpoint, config, torch.device("cpu")).whole_experts


def test_what_has_too_few_experts_is_refused(tmp_path: Path) -> None:
    folder = save("mixtral", tmp_path / "mixtral", with_tokenizer=False, num_local_experts=3, num_experts_per_tok=2)
    assert found(folder, 2)
    assert not found(folder, 1), "one rank has all of them in any case"
    with pytest.raises(ConfigError, match=r"model.experts is whole and model.tensor_parallel_size 4; .* mixtral has 3 experts"):
        found(folder, 4)
    with pytest.raises(ConfigError, match=r"model.experts is whole .* gpt_neox has 0 experts"):
        found(save("gpt_neox", tmp_path / "gpt_neox", with_tokenizer=False), 2)
