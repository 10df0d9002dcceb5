"""Every family on a CUDA device beside transformers: ``make test-gpu``. Elsewhere these tests are skipped, and say so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from serve.worker.runner import Runner
from tests.gpu.device import ALONE, ON_DEVICE, REHEARSED, has_fp8, load_on_device, some
from tests.serve.worker.family_worker import NEW_TOKENS, PROMPTS, generate, logits
from tests.serve.worker.test_family_parity import ROUTED, WORSE
from tests.serve.worker.test_quantized_model import rounded
from tests.support import reference
from tests.support.models import FAMILIES, MORE_FAMILIES, save

pytestmark = ON_DEVICE
EVERY = FAMILIES + MORE_FAMILIES
REHEARSAL = ("gpt_neox", "gemma2")
_ALL = {"num_experts_per_tok": 5}
EIGHT_BITS: dict[str, dict[str, int]] = {"llama": {}, "mixtral": _ALL, "gpt_oss": _ALL}
"""Of all experts, so that rounding chooses no others."""


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("family", some(EVERY, *REHEARSAL))
def test_in_fp32_it_gives_the_tokens_of_transformers(family: str, tmp_path: Path) -> None:
    folder = save(family, tmp_path / family, with_tokenizer=False)
    model = reference.load(folder)
    expected = [reference.greedy(model, prompt, NEW_TOKENS) for prompt in PROMPTS]
    assert generate(Runner(load_on_device(folder, "float32"), ALONE), ALONE) == expected


@pytest.mark.parametrize("family", some((family for family in EVERY if family not in ROUTED), *REHEARSAL))
def test_in_bf16_it_is_as_near_to_fp32_as_transformers(family: str, tmp_path: Path) -> None:
    folder = save(family, tmp_path / family, with_tokenizer=False)
    exact, theirs = reference.in_bf16(folder, PROMPTS[0])
    found = logits(load_on_device(folder, "bfloat16"), ALONE)
    assert found is not None
    assert (found.cpu() - exact).norm() <= WORSE * (theirs - exact).norm()


@pytest.mark.parametrize("quantization", some(("int8", "int4"), "int8"))
@pytest.mark.parametrize("family", some(("llama", "gpt2", "mixtral", "gpt_oss"), "mixtral"))
def test_weights_of_whole_numbers_give_what_they_stand_for(family: str, quantization: str, tmp_path: Path) -> None:
    folder = save(family, tmp_path / family, with_tokenizer=False)
    model = load_on_device(folder, "float32", quantization=quantization, quantization_group=64)
    assert model.facts.linear.startswith(f"{quantization}-")
    found = logits(model, ALONE)
    assert found is not None
    expected = rounded(folder, quantization)(torch.tensor([PROMPTS[0]])).logits[0]
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", some(EIGHT_BITS, "mixtral"))
def test_weights_of_eight_bits_are_near_the_plain_ones(family: str, tmp_path: Path) -> None:
    """In fp8, which a CPU does not have: whole numbers are rehearsed."""
    if not has_fp8():
        pytest.skip("this device has no fp8: it takes compute capability 8.9")
    folder = save(family, tmp_path / family, with_tokenizer=False, **EIGHT_BITS[family])
    quantized = "int8" if REHEARSED else "fp8"
    plain, found = (logits(load_on_device(folder, "bfloat16", quantization=name), ALONE) for name in ("none", quantized))
    assert plain is not None
    assert found is not None
    assert 0 < (found - plain).norm() <= 0.25 * plain.norm()
