"""Blocks are counted when steps have shown what they take: here on the CPU, where nothing is taken of a device."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from serve.config import CacheConfig, KernelsConfig, SchedulerConfig, ServerConfig
from serve.engine.plan import Span, StepPlan
from serve.model.cuda.tiling import cut
from serve.model.heads import Stage
from serve.worker import gpus, sizing
from serve.worker.drafting import Drafting, draft_bytes_per_block, with_blocks_of
from serve.worker.kv_cache import GIB, LIBRARIES_BYTES, CacheMemory, choose_memory
from serve.worker.loader import RankModel, Stopwatch, load_rank
from serve.worker.parallel import Ranks
from serve.worker.progress import Progress
from serve.worker.rank_loop import _trial
from serve.worker.runner import Runner
from serve.worker.trial import bytes_of_steps
from serve.worker.verify import _compare
from tests.serve.worker.family_worker import generate, load, settings
from tests.support.models import save

ALONE, CPU = Ranks(0, 1), torch.device("cpu")
MEMORY = 3 << 20


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    torch.set_num_threads(1)
    with torch.no_grad():
        yield


@pytest.fixture
def config(tmp_path: Path) -> ServerConfig:
    folder = save("llama", tmp_path / "llama", with_tokenizer=False)
    return dataclasses.replace(
        settings(folder, 1, "float32"),
        cache=CacheConfig(),
        kernels=KernelsConfig(cuda_graphs="on"),
        scheduler=SchedulerConfig(max_num_seqs=4, max_step_tokens=32),
    )


def test_blocks_are_counted_after_steps_were_captured_and_tried_and_the_model_has_them(
    config: ServerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[object] = []

    def memory(
        cache: CacheConfig, device: torch.device, local_ranks: int, *, promised_bytes: int, steps_bytes: int
    ) -> CacheMemory:
        order.append(("count", steps_bytes))
        return CacheMemory(MEMORY - steps_bytes, "for this test")

    def trial(model: RankModel, ranks: Ranks) -> int:
        order.append(("try", model.facts.num_blocks))
        assert bytes_of_steps(config, model, ranks) == 0, "of no device"
        return 1 << 20

    monkeypatch.setattr(sizing, "choose_memory", memory)
    model, _ = load_rank(config, 0, CPU, lambda: ALONE, Stopwatch(), trial=trial)
    each = sizing.bytes_per_block(model.survey, config, model.survey.heads.shared_heads(0).width, Stage())
    assert order == [("try", 33), ("count", 1 << 20)]
    assert model.steps_bytes == 1 << 20, "which other weights are not to take"
    assert model.facts.num_blocks == min((2 << 20) // each, 4 * 512 // 16) > 33
    runner = Runner(model, ALONE)
    assert runner.graphs is not None
    runner.graphs.capture()
    assert generate(runner, ALONE) == generate(Runner(load(Path(config.model.path), 1, ALONE), ALONE), ALONE)


@pytest.mark.parametrize(
    ("guesses", "split_spans"),
    [
        (0, [(510, 1, 0)] * 4),
        (3, [(509, 2, 1)] * 3 + [(509, 1, 0)]),
        (15, [(506, 5, 4)] * 3 + [(506, 4, 3)]),
        (64, [(503, 8, 7)] * 4),
    ],
)
def test_the_step_that_is_tried_is_the_largest_that_there_can_be(
    guesses: int, split_spans: list[tuple[int, int, int]], config: ServerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = dataclasses.replace(config.scheduler, speculative_tokens=guesses)
    config = dataclasses.replace(config, scheduler=scheduler)
    plans: list[StepPlan] = []
    execute = Runner.execute
    monkeypatch.setattr(Runner, "execute", lambda runner, plan: plans.append(plan) or execute(runner, plan))

    def trial(model: RankModel, ranks: Ranks) -> int:
        return bytes_of_steps(config, model, ranks)

    load_rank(config, 0, CPU, lambda: ALONE, Stopwatch(), trial=trial)
    largest, dropped, split, last = plans
    assert [span.count for span in largest.spans] == [8, 8, 8, 8]
    assert all(span.sample for span in largest.spans)
    found = [(span.start, span.count, len(span.proposed)) for span in split.spans]
    assert found == split_spans, "more than a share of each, with the guesses of a step shared out"
    short, long = cut((0, *itertools.accumulate(span.count for span in split.spans)), range(4), 8, 64)
    assert (len(short), long) == (4, []), "of which no sequence has so many that its positions are not split"
    for tried, after in ((largest, dropped), (split, last)):
        assert set(after.dropped) == {start.sequence for start in tried.starts}, "nothing of it stays"


@pytest.mark.parametrize(("changed", "why"), [({"kv_cache_gib": 0.004}, "its size is given"), ({}, "nothing is captured")])
def test_nothing_is_tried_where_it_would_decide_nothing(changed: dict[str, float], why: str, config: ServerConfig) -> None:
    config = dataclasses.replace(config, cache=CacheConfig(**changed))
    if not changed:
        config = dataclasses.replace(config, kernels=KernelsConfig())

    def trial(model: RankModel, ranks: Ranks) -> int:
        pytest.fail(why)

    load_rank(config, 0, CPU, lambda: ALONE, Stopwatch(), trial=trial)


@pytest.mark.parametrize(
    ("free", "fraction", "steps", "expected"),
    [
        (60 * GIB, 0.9, 0, 72 * GIB - 20 * GIB - LIBRARIES_BYTES),
        (60 * GIB, 0.9, 5 * GIB, 72 * GIB - 25 * GIB - LIBRARIES_BYTES),
        (30 * GIB, 0.9, 5 * GIB, 25 * GIB - LIBRARIES_BYTES),
        (30 * GIB, 0.45, 0, 36 * GIB - 20 * GIB - LIBRARIES_BYTES),
    ],
    ids=["alone", "room for steps", "another process has most of it", "half of a device that another server has half of"],
)
def test_blocks_of_a_gpu_have_what_its_share_leaves_and_no_more_than_is_free(
    free: int, fraction: float, steps: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 20 * GIB)
    memory = choose_memory(CacheConfig(memory_fraction=fraction), torch.device("cuda", 0), 1, steps_bytes=steps)
    assert memory.num_bytes == expected
    assert f"{steps / GIB:.1f} GiB kept for steps" in str(memory)


@pytest.mark.parametrize(
    ("reached", "said"),
    [
        (lambda one, other: True, "all 3 GPUs reach one another's memory (peer-to-peer)"),
        (
            lambda one, other: {one, other} == {0, 1},
            "no peer-to-peer between GPUs 0 and 2, 1 and 2: what they exchange goes through the host's memory, which is slower",
        ),
    ],
    ids=["all", "two of three"],
)
def test_whether_gpus_reach_one_another_is_told(reached: object, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", reached)
    assert gpus.exchange_of(3) == said


def test_a_draft_model_is_there_and_guesses_before_blocks_are_counted_and_has_as_many(
    config: ServerConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafting = save("llama", tmp_path / "draft", with_tokenizer=False, seed=3, num_hidden_layers=1)
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, draft_model=str(drafting)),
        scheduler=dataclasses.replace(config.scheduler, speculative_tokens=3),
    )
    guessed: list[tuple[int, ...]] = []
    guesses = Drafting._guesses

    def follow(drafting: Drafting, model: RankModel, spans: Sequence[Span]) -> list[list[int]]:
        guessed.append(tuple(len(span.proposed) for span in spans))
        return guesses(drafting, model, spans)

    monkeypatch.setattr(Drafting, "_guesses", follow)
    counted: list[int] = []

    def memory(
        cache: CacheConfig, device: torch.device, local_ranks: int, *, promised_bytes: int, steps_bytes: int
    ) -> CacheMemory:
        counted.append(len(guessed))
        return CacheMemory(MEMORY, "for this test")

    monkeypatch.setattr(sizing, "choose_memory", memory)
    drafts: list[RankModel | None] = []
    beside = draft_bytes_per_block(config, 0, CPU)
    trial = _trial(config, Progress(), drafts)
    model, _ = load_rank(config, 0, CPU, lambda: ALONE, Stopwatch(), beside=beside, trial=trial)
    assert guessed == [(1, 1, 1)], "of as many sequences as a step has guesses for"
    assert counted == [1], "after the draft model was there and had guessed"
    draft = with_blocks_of(model, drafts[0], config)
    assert draft is not None
    assert model.facts.num_blocks > 33
    assert {len(cache.keys) for cache in (*model.caches, *draft.caches)} == {model.facts.num_blocks}
    own = sizing.bytes_per_block(model.survey, config, model.survey.heads.shared_heads(0).width, Stage())
    assert model.facts.num_blocks == min(MEMORY // (own + beside), 4 * 512 // 16)
    runner = Runner(model, ALONE, draft)
    assert generate(runner, ALONE) == generate(Runner(load(Path(config.model.path), 1, ALONE), ALONE), ALONE)


def test_logits_are_compared_with_those_of_the_whole_model_before_blocks_take_its_room(
    config: ServerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, verify_logits=True))
    monkeypatch.setattr("serve.worker.verify.verify_logits", lambda *_: order.append("compared"))
    monkeypatch.setattr("serve.worker.trial.bytes_of_steps", lambda *_: order.append("steps") or 7)  # type: ignore[func-returns-value]  # None is meant
    monkeypatch.setattr(gpus, "give_back", lambda _: order.append("given back"))

    def count(*_: object, **told: int) -> CacheMemory:
        order.append(f"blocks beside {told['steps_bytes']} bytes")
        return CacheMemory(MEMORY, "for this test")

    monkeypatch.setattr(sizing, "choose_memory", count)
    load_rank(config, 0, CPU, lambda: ALONE, Stopwatch(), trial=_trial(config, Progress(), []))
    assert order == ["compared", "given back", "steps", "blocks beside 7 bytes"]


def test_numbers_that_are_none_are_left_to_the_first_forward_which_names_their_tensor() -> None:
    """The comparison comes before it, and has nothing to say of them."""
    numbers, none = torch.ones(2, 3), torch.full((2, 3), torch.nan)
    assert _compare("float32", [("layer", none), ("the logits", none)], [("layer", numbers), ("the logits", none)]) == ""
