"""Every family on a CUDA device beside transformers: ``make test-gpu``. Elsewhere these tests are skipped, and say so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from serve.worker.runner import Runner
from tests.gpu.device import ALONE, ON_DEVICE, load_on_device, some
from tests.serve.worker.family_worker import NEW_TOKENS, PROMPTS, generate, logits
from tests.serve.worker.test_family_parity import ROUTED, WORSE
from tests.support import reference
from tests.support.models import FAMILIES, MORE_FAMILIES, save

pytestmark = ON_DEVICE
EVERY = FAMILIES + MORE_FAMILIES
REHEARSAL = ("gpt_neox", "gemma2")


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
