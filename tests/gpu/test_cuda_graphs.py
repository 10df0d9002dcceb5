"""Captured decoding steps on a CUDA device: ``make test-gpu``. Elsewhere these tests are skipped, and say so."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from serve.engine.plan import StepResult
from serve.types import SamplingParams
from serve.worker.runner import Runner
from serve.worker.sampling.backend import TorchSampling
from tests.gpu.device import ALONE, DEVICE, ON_DEVICE, groups_products, reserved_bytes, some, waits_of_host
from tests.serve.worker.captured import load_captured, tokens_of_both_ways
from tests.serve.worker.family_worker import generate
from tests.serve.worker.steps_ahead import one_ahead, plans
from tests.serve.worker.test_decode_graphs import SAMPLING, decode_plan
from tests.serve.worker.test_family_parity import ROUTED
from tests.serve.worker.test_launched_ahead import DRAWN, PENALISED, told
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
    if family in ROUTED and not groups_products():
        pytest.skip("this device computes experts one after the other: it takes compute capability 9 or 10")
    folder = save(family, tmp_path / family, with_tokenizer=False)
    tokens_of_both_ways(load_captured(folder, ALONE, dtype, device=DEVICE), ALONE, monkeypatch)


def test_a_step_is_launched_and_sampled_without_waiting_for_the_device(tmp_path: Path) -> None:
    model = load_captured(save("llama", tmp_path / "llama", with_tokenizer=False), ALONE, device=DEVICE)
    runner = Runner(dataclasses.replace(model, sampling=TorchSampling()), ALONE)
    assert runner.graphs is not None
    runner.graphs.capture()
    first, second = decode_plan(1, (5, 20, 33, 12), SAMPLING)
    runner.execute(first)
    with waits_of_host() as waits:
        launched = runner.launch(second)
    result = runner.settle(launched)
    assert result is not None
    assert len(result.sampled) == 4
    assert waits == []


@pytest.mark.parametrize("logprobs", [None, 2])
@pytest.mark.parametrize("sampling", [(), DRAWN, PENALISED], ids=["greedy", "drawn", "penalised"])
def test_steps_that_are_launched_ahead_give_what_they_give_one_after_the_other(
    sampling: tuple[SamplingParams, ...], logprobs: int | None, tmp_path: Path
) -> None:
    """Behind steps of prompts in chunks, and behind one another."""
    folder = save("llama", tmp_path / "llama", with_tokenizer=False)
    runner = Runner(load_captured(folder, ALONE, "bfloat16", device=DEVICE), ALONE)
    assert runner.graphs is not None
    runner.graphs.capture()
    wanted = list(plans(sampling, logprobs=logprobs))
    expected = told([runner.execute(plan) for plan in wanted])
    found, followed = one_ahead(runner, wanted)
    assert told(found) == expected
    assert followed > 12


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
