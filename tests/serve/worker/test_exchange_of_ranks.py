"""Two ranks exchange their weights together or not at all, and one that dies meanwhile is named."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from serve.config import KernelsConfig, ServerConfig
from serve.engine.executor import ExecutorDied, Prepared
from serve.engine.plan import Span, Start, StepPlan
from serve.types import BlockId, SamplingParams, SequenceId
from serve.worker import rank_process
from serve.worker.executor import RankExecutor
from serve.worker.rank_process import ForkStarter
from tests.serve.worker.test_executor import PATIENCE_SECONDS, _config, _pids, _until
from tests.support import reference
from tests.support.models import save, save_gpt_oss

PROMPTS = ([3, 4, 5], [17, 6], [101, 9, 88, 4], [42])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models, and the second again with a row of the head, rank 1's, that is infinite: only rank 0 sees the logits."""
    root = tmp_path_factory.mktemp("editions")
    found = [save("gpt_neox", root / str(seed), seed=seed, with_tokenizer=False) for seed in (0, 1)]
    broken = Path(shutil.copytree(found[1], root / "broken"))
    stored = load_file(broken / "model.safetensors")
    stored["embed_out.weight"][-1] = float("inf")
    save_file(stored, broken / "model.safetensors", metadata={"format": "pt"})
    return [*found, broken]


@pytest.fixture
def started(folders: list[Path]) -> Iterator[RankExecutor]:
    with started_from(folders[0]) as executor:
        yield executor


def config_of(folder: Path, way: str) -> ServerConfig:
    """``way``: how the ranks share and compute experts, if there are any."""
    config = _config(folder)
    model = dataclasses.replace(config.model, experts="whole" if way == "whole" else "inside")
    graphs = "on" if way == "stacked" else "off"  # a capture on the CPU computes in plain torch, of few rows in little time
    return dataclasses.replace(config, model=model, kernels=KernelsConfig(cuda_graphs=graphs, cuda_graph_max_batch=4))


@contextlib.contextmanager
def started_from(folder: Path, *, way: str = "packed") -> Iterator[RankExecutor]:
    with contextlib.closing(ForkStarter(2, "cpu", stall_seconds=60.0)) as starter:
        executor = RankExecutor(config_of(folder, way), starter)
        executor.start()
        try:
            yield executor
        finally:
            executor.close()


def tokens(executor: RankExecutor, step: int) -> list[int]:
    """The likeliest token behind each prompt, computed anew; nothing of it stays."""
    starts, spans = [], []
    for number, prompt in enumerate(PROMPTS):
        sequence, count = SequenceId(step * 100 + number), len(prompt)
        sampling = SamplingParams(temperature=0.0)
        starts.append(Start(sequence=sequence, index=0, token_ids=tuple(prompt), num_prompt_tokens=count, sampling=sampling))
        spans.append(Span(sequence=sequence, start=0, count=count, new_blocks=(BlockId(number),), sample=True))
    sampled = executor.execute(StepPlan(step=step, starts=tuple(starts), spans=tuple(spans))).sampled
    executor.execute(StepPlan(step=step + 1, dropped=tuple(start.sequence for start in starts)))
    return [each.token_id for each in sorted(sampled, key=lambda each: each.sequence)]


def take(
    executor: RankExecutor, folder: Path, number: int, *, beside: bool, limit_gib: float | None = None, way: str = "packed"
) -> str:
    """Why the ranks refused the weights of a folder; "" where they took them."""
    config = config_of(folder, way)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, swap_memory_gib=limit_gib))
    prepared = executor.prepare(config, number)
    assert isinstance(prepared, Prepared)
    assert prepared.beside == beside
    limit = threading.Timer(PATIENCE_SECONDS, executor.close)  # ranks that disagree wait for one another
    limit.start()
    try:
        refused = executor.execute(StepPlan(step=number, swap=number)).refused
    finally:
        limit.cancel()
    executor.forget_prepared()
    return refused


def test_ranks_take_other_weights_together_and_keep_theirs_where_one_of_them_finds_a_fault(
    folders: list[Path], started: RankExecutor
) -> None:
    first, second = ([reference.greedy(reference.load(folder), prompt, 1)[0] for prompt in PROMPTS] for folder in folders[:2])
    assert first != second
    good, broken = folders[1], folders[2]
    assert tokens(started, 0) == first
    assert "not finite" in take(started, broken, 1, beside=True)
    assert tokens(started, 2) == first, "both ranks turned back"
    assert take(started, good, 4, beside=True) == ""
    assert tokens(started, 5) == second
    assert "not finite" in take(started, broken, 7, beside=False, limit_gib=1e-9)
    assert tokens(started, 8) == second, "both ranks read again what they had"
    assert take(started, folders[0], 10, beside=False, limit_gib=1e-9) == ""
    assert tokens(started, 11) == first


@pytest.mark.parametrize("way", ["packed", "stacked", "whole"])
def test_ranks_that_share_experts_with_biases_take_others(way: str, tmp_path: Path) -> None:
    """Of a bias that follows their sum one rank adds all."""
    folders = [save_gpt_oss(tmp_path / str(seed), seed) for seed in (0, 1)]
    first, second = ([reference.greedy(reference.load(folder), prompt, 1)[0] for prompt in PROMPTS] for folder in folders)
    assert first != second
    with started_from(folders[0], way=way) as executor:
        assert tokens(executor, 0) == first
        for number, (folder, expected, limit_gib) in enumerate(((1, second, None), (0, first, 1e-9), (1, second, 1e-9)), 1):
            beside = limit_gib is None
            assert take(executor, folders[folder], 10 * number, beside=beside, limit_gib=limit_gib, way=way) == ""
            assert tokens(executor, 10 * number + 1) == expected


def test_ranks_of_which_one_runs_out_of_memory_read_other_weights_into_place_together(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = ([reference.greedy(reference.load(folder), prompt, 1)[0] for prompt in PROMPTS] for folder in folders[:2])
    several = (*rank_process._FOR_SEVERAL, "tests.serve.worker.full_device")
    monkeypatch.setattr(rank_process, "_FOR_SEVERAL", several)
    with started_from(folders[0]) as executor:
        assert tokens(executor, 0) == first
        assert take(executor, folders[1], 1, beside=False) == ""
        assert tokens(executor, 2) == second
        assert "not finite" in take(executor, folders[2], 4, beside=False)
        assert tokens(executor, 5) == second, "both ranks read again what they had"


def test_a_rank_that_is_killed_while_weights_are_exchanged_ends_the_exchange_and_is_named(
    folders: list[Path], started: RankExecutor
) -> None:
    assert isinstance(started.prepare(_config(folders[1]), 1), Prepared)
    victim = _pids(started)[1]
    os.kill(victim, signal.SIGSTOP)
    outcome: list[ExecutorDied] = []

    def exchange() -> None:
        try:
            started.execute(StepPlan(step=0, swap=1))
        except ExecutorDied as error:
            outcome.append(error)

    waiting = threading.Thread(target=exchange)
    waiting.start()
    _until(lambda: started.hanging_rank() == 1)  # rank 0 is in the exchange, and waits
    os.kill(victim, signal.SIGKILL)
    _until(started.dead_rank)
    message = str(started.dead_rank())
    assert "rank 1 died" in message
    assert "SIGKILL" in message
    started.close()
    waiting.join(timeout=PATIENCE_SECONDS)
    assert len(outcome) == 1
