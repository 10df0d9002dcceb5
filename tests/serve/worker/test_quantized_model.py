"""A model of whole numbers against transformers with the same rounded weights; what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from serve.config import CacheConfig, ModelConfig, ServerConfig
from serve.errors import ConfigError
from serve.model.checks import check_quantization
from serve.model.filling import Filling
from serve.model.quantized import BITS, quantize
from serve.worker import loader
from serve.worker.loader import RankModel, Stopwatch, load_rank
from serve.worker.parallel import Ranks
from serve.worker.runner import Runner
from tests.serve.worker.family_worker import generate, logits
from tests.support.kernels import cpu_kernels
from tests.support.models import save

PROMPT = tuple((7 * place * place) % 500 + 1 for place in range(21))


def load(path: Path, quantization: Literal["int8", "int4"]) -> RankModel:
    config = ServerConfig(
        model=ModelConfig(
            path=str(path), dtype="float32", device="cpu", max_model_len=512, quantization=quantization, quantization_group=64
        ),
        cache=CacheConfig(kv_cache_gib=0.01, block_tokens=16),
    )
    return load_rank(config, 0, torch.device("cpu"), lambda: Ranks(0, 1), Stopwatch())[0]


def rounded(path: Path, quantization: str) -> nn.Module:
    """transformers' model with every linear layer's weight replaced by what the whole numbers stand for."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear):  # a tied head has a weight of its own from now on
                weight = quantize(module.weight, BITS[quantization], 64).dequantized()
                module.weight = nn.Parameter(weight)
            elif type(module).__name__ == "Conv1D":
                module.weight = nn.Parameter(quantize(module.weight.t(), BITS[quantization], 64).dequantized().t())
            for stack in module.parameters(recurse=False):
                if stack.dim() == 3:
                    for expert in stack:
                        weight = expert.t() if module.is_transposed else expert
                        weight.copy_(quantize(weight, BITS[quantization], 64).dequantized())
    return model


@torch.inference_mode()
@pytest.mark.parametrize("with_kernels", [True, False])
@pytest.mark.parametrize(
    ("family", "quantization"),
    [
        ("gpt_neox", "int8"),
        ("gpt2", "int4"),
        ("llama", "int4"),
        ("gptj", "int8"),
        ("mixtral", "int8"),
        ("mixtral", "int4"),
        ("gpt_oss", "int8"),
    ],
)
def test_greedy_tokens_and_logits_are_those_of_the_rounded_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, quantization: Literal["int8", "int4"], with_kernels: bool
) -> None:
    if with_kernels:
        cpu_kernels()
    else:
        monkeypatch.setattr(loader, "load_kernels", lambda *_: None)
    path = save(family, tmp_path, with_tokenizer=False)
    judge = rounded(path, quantization)
    model = load(path, quantization)
    assert model.facts.linear.startswith(quantization + "-")
    found = logits(model, Ranks(0, 1), PROMPT)
    assert found is not None
    torch.testing.assert_close(found, judge(torch.tensor([PROMPT])).logits[0], rtol=1e-4, atol=1e-4)
    expected = judge.generate(torch.tensor([PROMPT]), max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0)
    [tokens] = generate(Runner(model, Ranks(0, 1)), Ranks(0, 1), [PROMPT])
    assert tokens == expected[0, len(PROMPT) :].tolist()


@torch.inference_mode()
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_other_weights_change_place_with_whole_numbers_too(tmp_path: Path, family: str) -> None:
    first, second = (save(family, tmp_path / str(seed), with_tokenizer=False, seed=seed) for seed in (0, 1))
    model = load(first, "int8")
    before, expected = (logits(load(path, "int8"), Ranks(0, 1), PROMPT) for path in (first, second))
    config = ServerConfig(model=ModelConfig(path=str(second), dtype="float32", device="cpu", quantization="int8"))
    with loader.opened(config, everything=False) as checkpoint:
        blueprint = loader.survey(checkpoint, config, torch.device("cpu")).blueprint
        old: list[Filling] = [filling.put() for filling in model.filler.read(checkpoint, blueprint)]
    after = logits(model, Ranks(0, 1), PROMPT)
    assert after is not None
    assert expected is not None
    assert before is not None
    torch.testing.assert_close(after, expected, rtol=0, atol=0)
    for filling in old:
        filling.put()
    back = logits(model, Ranks(0, 1), PROMPT)
    assert back is not None
    torch.testing.assert_close(back, before, rtol=0, atol=0)


def test_what_has_no_layers_of_whole_numbers_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"^model.quantization is fp8; it is for GPUs, and model.device is cpu: choose int8$"):
        check_quantization("fp8", "cpu")
    for quantization in ("none", "int8", "int4"):
        check_quantization(quantization, "cpu")
        check_quantization(quantization, "cuda")
    check_quantization("fp8", "cuda")
    with pytest.raises(ConfigError, match=r"^model.quantization_group is 48; it must be 32, 64 or 128$"):
        ModelConfig(path="x", quantization="int4", quantization_group=48)
    with pytest.raises(ConfigError, match=r"^model.quantization is 'int8'; it must be none with model.verify_logits"):
        ModelConfig(path="x", quantization="int8", verify_logits=True)
