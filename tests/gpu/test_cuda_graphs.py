"""Captured decoding steps on a CUDA device: ``make test-gpu``. Elsewhere these tests are skipped, and say so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from serve.worker.parallel import Ranks
from serve.worker.runner import Runner
from tests.serve.worker.captured import load_captured, tokens_of_both_ways
from tests.serve.worker.family_worker import generate
from tests.serve.worker.test_decode_graphs import SAMPLING, decode_plan
from tests.support.models import FAMILIES, MORE_FAMILIES, save

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")]
ALONE = Ranks(0, 1)
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


@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_a_cuda_graph_gives_what_the_step_gives_bit_for_bit(
    family: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(family, tmp_path / family, with_tokenizer=False)
    tokens_of_both_ways(load_captured(folder, ALONE, dtype, device="cuda"), ALONE, monkeypatch)


def test_a_step_is_launched_and_sampled_without_waiting_for_the_device(tmp_path: Path) -> None:
    """torch warns where the host would wait, but for the one copy of what was sampled."""
    model = load_captured(save("llama", tmp_path / "llama", with_tokenizer=False), ALONE, device="cuda")
    runner = Runner(model, ALONE)
    assert runner.graphs is not None
    runner.graphs.capture()
    first, second = decode_plan(1, (5, 20, 33, 12), SAMPLING)
    runner.execute(first)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning, match="synchroniz") as waits:
            result = runner.execute(second)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert result is not None
    assert len(result.sampled) == 4
    assert len([warning for warning in waits if "synchroniz" in str(warning.message)]) == 1, "the copy of the tokens"


def test_graphs_may_be_captured_again(tmp_path: Path) -> None:
    """As they are after an exchange of weights; the memory of the first is free again then."""
    runner = Runner(load_captured(save("llama", tmp_path / "llama", with_tokenizer=False), ALONE, device="cuda"), ALONE)
    assert runner.graphs is not None
    runner.graphs.capture()
    tokens, taken = generate(runner, ALONE), torch.cuda.memory_reserved()
    for _ in range(3):
        runner.graphs.capture()
    assert generate(runner, ALONE) == tokens
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= 2 * taken
