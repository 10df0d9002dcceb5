"""Stages that share a model's layers: here two of one rank each, in two threads of this process."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from checkpoint import Checkpoint
from serve.config import CacheConfig, KernelsConfig, ModelConfig, NodesConfig, SchedulerConfig, ServerConfig
from serve.errors import ConfigError
from serve.model.heads import Piece, Stage, check_pipeline_parallel
from serve.worker import sizing
from serve.worker.canary import check_forward
from serve.worker.kv_cache import CacheMemory
from serve.worker.loader import RankModel, Stopwatch, load_rank
from serve.worker.parallel import Ranks
from serve.worker.progress import Progress
from serve.worker.runner import Runner
from serve.worker.vitals import Vitals, furthest_behind
from tests.serve.worker.family_worker import BLOCK_TOKENS, generate, load, settings
from tests.support.models import save

T = TypeVar("T")

STAGES = 2
PATIENCE_SECONDS = 400.0
MEMORY = 1 << 20
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_neox": ("gpt_neox", {}),
    "gpt2, whose head is its embedding": ("gpt2", {}),
    "opt, projected": ("opt", {"word_embed_proj_dim": 48}),
    "bloom, normed embedding": ("bloom", {}),
    "gemma2, scaled embedding": ("gemma2", {}),
    "mixtral": ("mixtral", {}),
}
"""One of each way in which something lies before the first layer or behind the last."""


class Beside(Ranks):
    """The one rank of a stage, whose neighbour is another thread."""

    def __init__(self, number: int, ways: dict[tuple[int, str], queue.Queue[Any]]) -> None:
        super().__init__(0, 1, stage=Stage(number, STAGES))
        self._ways = ways

    def _put(self, what: str, value: object) -> None:
        self._ways[self.stage.number, what].put(value)

    def _get(self, what: str) -> Any:
        return self._ways[1 - self.stage.number, what].get(timeout=PATIENCE_SECONDS)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        tensor: Tensor = self._get("hidden")
        assert (tensor.numel(), tensor.dtype, tensor.device) == (torch.Size(shape).numel(), dtype, device)
        return tensor.view(shape)

    def hand_on(self, tensor: Tensor) -> None:
        self._put("hidden", tensor.clone())

    def numbers_of_first(self, numbers: list[int], device: torch.device) -> list[int]:
        if not self.answers:
            told: list[int] = self._get("numbers")
            return told
        self._put("numbers", numbers)
        return numbers

    def smallest(self, value: int) -> int:
        self._put("value", value)
        return min(value, self._get("value"))

    def told_by_first(self, text: str, stage: int = 0) -> str:
        if self.stage.number != stage:
            return str(self._get("text"))
        self._put("text", text)
        return text


def _neighbours() -> list[Beside]:
    ways = {(number, what): queue.Queue[Any]() for number in range(STAGES) for what in ("hidden", "numbers", "value", "text")}
    return [Beside(number, ways) for number in range(STAGES)]


def _stage(folder: Path, ranks: Ranks, num_blocks: int | None = 80) -> RankModel:
    config = settings(folder, 1, "float32", STAGES)
    return load_rank(config, ranks.number, torch.device("cpu"), lambda: ranks, Stopwatch(), num_blocks=num_blocks)[0]


def _side_by_side(work: Callable[[int], T]) -> list[T]:
    with ThreadPoolExecutor(STAGES) as pool:
        return list(pool.map(work, range(STAGES)))


@pytest.mark.parametrize("name", CASES)
def test_stages_say_what_the_whole_model_says_each_from_its_own_tensors_and_cache(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, changes = CASES[name]
    folder = save(family, tmp_path, with_tokenizer=False, **changes)
    alone = Ranks(0, 1)
    whole = load(folder, 1, alone)
    expected = generate(Runner(whole, alone), alone)
    read: list[set[str]] = [set() for _ in range(STAGES)]
    neighbours, models, plain = _neighbours(), [], {"read": Checkpoint.read, "view": Checkpoint.view}
    for number, ranks in enumerate(neighbours):
        for way, found in plain.items():

            def noting(
                self: Checkpoint, name: str, *rest: Any, _into: set[str] = read[number], _found: Any = found, **more: Any
            ) -> Tensor | None:
                _into.add(name)
                made: Tensor | None = _found(self, name, *rest, **more)
                return made

            monkeypatch.setattr(Checkpoint, way, noting)
        models.append(_stage(folder, ranks))
    assert _side_by_side(lambda number: generate(Runner(models[number], neighbours[number]), neighbours[number])) == [
        expected,
        expected,
    ]
    tied = {next(name for name in read[0] if "wte" in name)} if family == "gpt2" else set()
    assert read[0] | read[1] == whole.stored
    if family in ("gpt2", "gpt_neox"):
        assert read[0] & read[1] == tied, "what two stages read is the tensor that both embed and judge by"
    each = [sum(parameter.numel() for parameter in model.body.parameters()) for model in models]
    assert 0 < each[1] < each[0] < sum(parameter.numel() for parameter in whole.body.parameters())


def test_ranks_of_all_stages_share_the_memory_and_the_one_with_most_layers_says_how_many_blocks_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, sharing = save("gpt_neox", tmp_path, with_tokenizer=False), []

    def memory(
        cache: CacheConfig, device: torch.device, local_ranks: int, *, promised_bytes: int, steps_bytes: int
    ) -> CacheMemory:
        sharing.append(local_ranks)
        return CacheMemory(MEMORY, "for this test")

    monkeypatch.setattr(sizing, "choose_memory", memory)
    neighbours = _neighbours()
    models = _side_by_side(lambda number: _stage(folder, neighbours[number], None))
    assert sharing == [STAGES] * STAGES
    most = 2 * 2 * 4 * 16 * BLOCK_TOKENS * 4  # bytes of two layers' keys and values of 4 heads of 16 numbers
    assert [model.facts.num_blocks for model in models] == [MEMORY // most] * STAGES


def test_layers_are_dealt_out_near_evenly_and_none_twice() -> None:
    assert [Stage(number, 3).layers(8) for number in range(3)] == [Piece(0, 3), Piece(3, 6), Piece(6, 8)]
    assert Stage().layers(8) == Piece(0, 8)
    assert (Stage().is_first, Stage().is_last) == (True, True)
    check_pipeline_parallel(3, 3)
    with pytest.raises(ConfigError, match=r"model\.pipeline_parallel_size is 4; the model's 3 layers"):
        check_pipeline_parallel(3, 4)


@pytest.mark.parametrize("bad", range(STAGES))
def test_numbers_that_are_not_finite_are_told_by_the_stage_where_they_begin(tmp_path: Path, bad: int) -> None:
    folder = save("gpt_neox", tmp_path, with_tokenizer=False)
    neighbours = _neighbours()
    models = [_stage(folder, ranks) for ranks in neighbours]
    path, layer = (("layers.1", "layers.1"), ("layers.2", "layers.2"))[bad]
    models[bad].body.get_submodule(path).register_forward_hook(lambda *call: call[-1] * float("nan"))

    def check(number: int) -> str:
        model, ranks = models[number], neighbours[number]
        with pytest.raises(ConfigError) as refused:
            check_forward(ModelConfig(path=str(folder)), model, ranks, Runner(model, ranks))
        return str(refused.value)

    told = _side_by_side(check)
    assert f"after {layer}, though its weights are" in told[0]
    assert told[0] == told[1]


@contextlib.contextmanager
def _seen(counts: list[int]) -> Iterator[list[Vitals]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        seen = [Vitals(number, 0, ours, 0.0) for number in range(len(counts))]
        for vitals, count in zip(seen, counts, strict=True):
            vitals.count = count
        yield seen


def test_a_stage_that_waits_for_another_is_not_the_one_that_hangs() -> None:
    """Each stage does another number of things in a step; only where it is in the step tells who waits for whom."""
    first, second = progresses = Progress(), Progress()

    def behind() -> int | None:
        with _seen([progress.count for progress in progresses]) as seen:
            return furthest_behind(seen)

    for _ in range(2):
        for progress in progresses:
            progress.mark()  # the plan came
        second.reach(1, STAGES)
        assert behind() == 0, "the second waits for what the first computes"
        for _ in range(100):
            first.mark()
        assert behind() == 0
        first.reach(STAGES, STAGES)
        assert behind() == 1, "the first is through, and waits for what the second draws"
        first.mark()
        second.mark()
        assert behind() == 1
        second.reach(STAGES, STAGES)
        second.mark()
        assert behind() is None


def test_what_stages_cannot_do_is_refused_by_name() -> None:
    for change, rule in (
        ({"pipeline_parallel_size": 0}, "be at least 1"),
        ({"draft_model": "small"}, "be 1 with model.draft_model"),
        ({"verify_logits": True}, "be 1 with model.verify_logits"),
    ):
        with pytest.raises(ConfigError, match=rf"model\.pipeline_parallel_size is \d; it must {rule}"):
            ModelConfig(**{"path": "x", "pipeline_parallel_size": 2, **change})
    with pytest.raises(ConfigError, match=r"name one GPU for each of 4 ranks"):
        ModelConfig(path="x", tensor_parallel_size=2, pipeline_parallel_size=2, gpus="0,1")
    two = ServerConfig(model=ModelConfig(path="x", pipeline_parallel_size=2), scheduler=SchedulerConfig(speculative_tokens=4))
    with pytest.raises(ConfigError, match=r"be 1 with kernels\.cuda_graphs on"):
        dataclasses.replace(two, kernels=KernelsConfig(cuda_graphs="on"))
    nodes = NodesConfig(count=3, agents_listen="127.0.0.1:0", agents_key_file="key")
    with pytest.raises(ConfigError, match=r"times model\.pipeline_parallel_size \(2\) is 2; it must be at least nodes"):
        dataclasses.replace(two, nodes=nodes)
    for size, each in ((2, (2, 1, 1)), (3, (2, 2, 2))):
        model = ModelConfig(path="x", tensor_parallel_size=size, pipeline_parallel_size=2)
        assert dataclasses.replace(two, model=model, nodes=nodes).ranks_per_node == each
