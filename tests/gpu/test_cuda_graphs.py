"""Captured decoding steps on a CUDA device: ``make test-gpu``. Elsewhere these tests are skipped, and say so."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from serve.engine.plan import StepResult
from serve.worker.runner import Runner
from serve.worker.sampling.backend import TorchSampling
from tests.gpu.device import ALONE, DEVICE, ON_DEVICE, REHEARSED, reserved_bytes, some, waits_of_host
from tests.serve.worker.captured import load_captured, tokens_of_both_ways
from tests.serve.worker.family_worker import generate
from tests.serve.worker.test_decode_graphs import SAMPLING, decode_plan
from tests.support.models import FAMILIES, MORE_FAMILIES, save

pytestmark = ON_DEVICE
CASES = [
    (family, dtype)
    for family in FAMILIES + MORE_FAMILIES
    for dtype in ("float32", "bfloat16")
    if dtype == "bfloat16" or family not in ("mixtral", "gpt_oss")  # experts are captured in bfloat16 alone
]


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize(("family", "dtype"), some(CASES, ("llama", "bfloat16")))
def test_a_cuda_graph_gives_what_the_step_gives_bit_for_bit(
    family: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(family, tmp_path / family, with_tokenizer=False)
    tokens_of_both_ways(load_captured(folder, ALONE, dtype, device=DEVICE), ALONE, monkeypatch)


def test_a_step_is_launched_and_sampled_without_waiting_for_the_device(tmp_path: Path) -> None:
    """But for the one copy of what was sampled, which is none where the device is the CPU."""
    model = load_captured(save("llama", tmp_path / "llama", with_tokenizer=False), ALONE, device=DEVICE)
    runner = Runner(dataclasses.replace(model, sampling=TorchSampling()), ALONE)
    assert runner.graphs is not None
    runner.graphs.capture()
    first, second = decode_plan(1, (5, 20, 33, 12), SAMPLING)
    runner.execute(first)
    with waits_of_host() as waits:
        result = runner.execute(second)
    assert result is not None
    assert len(result.sampled) == 4
    assert len(waits) == (0 if REHEARSED else 1), "the copy of the tokens"


def test_what_is_drawn_by_replays_is_what_is_drawn_after_the_step(tmp_path: Path) -> None:
    model = load_captured(save("llama", tmp_path / "llama", with_tokenizer=False), ALONE, device=DEVICE)
    first, second = decode_plan(1, (5, 20, 33, 12), SAMPLING)
    results: list[StepResult | None] = []
    for captured in (False, True):
        runner = Runner(model, ALONE)
        assert runner.graphs is not None
        runner.execute(first)
        if captured:
            runner.graphs.capture()
        results.append(runner.execute(second))
    assert results[0] == results[1]


def test_graphs_may_be_captured_again(tmp_path: Path) -> None:
    """As they are after an exchange of weights; the memory of the first is free again then."""
    runner = Runner(load_captured(save("llama", tmp_path / "llama", with_tokenizer=False), ALONE, device=DEVICE), ALONE)
    assert runner.graphs is not None
    runner.graphs.capture()
    tokens, taken = generate(runner, ALONE), reserved_bytes()
    for _ in range(3):
        runner.graphs.capture()
    assert generate(runner, ALONE) == tokens
    assert reserved_bytes() <= 2 * taken
