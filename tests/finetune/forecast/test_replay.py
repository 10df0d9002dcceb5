"""One micro-batch followed and replayed: what is made is freed, every weight is met, and the sums are those of the pieces."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from transformers import masking_utils

from finetune.config import ActivationConfig, BatchConfig, LoraConfig, ModelConfig, TuneConfig
from finetune.forecast import replay as replaying
from finetune.forecast.estimate import model_config_of
from finetune.forecast.facts import ModelFacts, facts_of
from finetune.forecast.follow import Event, Trace, What
from finetune.forecast.heap import Heap
from finetune.forecast.layout import Layout
from finetune.forecast.replay import replay
from finetune.machine.pages import SMALLEST_BYTES
from tests.finetune.forecast.support import NEW, config_of

MADE, FREED, USED, GRADIENT = What.MADE, What.FREED, What.USED, What.GRADIENT
KIB, MIB = 1 << 10, 1 << 20
PAGE = 4 * KIB
USUAL = Layout(
    stage=3, ranks=1, pipeline=1, device="cpu", weight_bytes=4, algorithm="adamw", optimizer="none", parameters="none",
    accumulation=1, bucket=1 << 30, checkpoint_on_cpu=False,
)  # fmt: skip


class Witness(Heap):
    """A heap that remembers what is in it, and refuses to take twice or give what it has not."""

    made: list[Witness]

    def __init__(self, *, keeps_end: bool = False) -> None:
        super().__init__(keeps_end=keeps_end)
        self.live: dict[int, int] = {}
        self.taken = 0
        type(self).made.append(self)

    def take(self, number: int, size: int, *, followed: bool = False) -> None:
        assert number not in self.live
        self.live[number] = size
        self.taken += 1
        super().take(number, size, followed=followed)
        assert sum(self.live.values()) <= self.used_bytes + self.paged_bytes, "no piece is smaller than was asked for"

    def take_unwritten(self, number: int, size: int) -> None:
        assert number not in self.live
        super().take_unwritten(number, size)
        self.live[number] = 0

    def write(self, number: int, size: int) -> None:
        super().write(number, size)
        self.live[number] = size

    def give(self, number: int) -> None:
        del self.live[number]
        super().give(number)
        assert self.gap_bytes >= 0


@pytest.fixture
def heaps(monkeypatch: pytest.MonkeyPatch) -> list[Witness]:
    monkeypatch.setattr(Witness, "made", [], raising=False)
    monkeypatch.setattr(replaying, "Heap", Witness)
    return Witness.made


def random_trace(draw: random.Random, weights: int = 5, frozen: int = 1) -> Trace:
    """A forward and a backward pass of made-up storages; the last ``frozen`` weights get no gradient."""
    sizes = [draw.randint(1, 2000) for _ in range(weights)]
    events: list[Event] = []
    alive: list[int] = []
    count = 0

    def some() -> None:
        nonlocal count
        for _ in range(draw.randint(0, 4)):
            if alive and draw.random() < 0.4:
                events.append(Event(FREED, alive.pop(draw.randrange(len(alive))), 0))
            else:
                events.append(Event(MADE, count, draw.choice([100, 5000, 70_000, 3_000_000])))
                alive.append(count)
                count += 1

    for number, size in enumerate(sizes):
        events.append(Event(USED, number, size))
        some()
    for number in reversed(range(weights - frozen)):
        some()
        events.append(Event(GRADIENT, number, sizes[number]))
    return (*events, *(Event(FREED, number, 0) for number in alive))


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_allocations_of_a_replay_balance(heaps: list[Witness], stage: int, seed: int) -> None:
    draw = random.Random(f"{stage} {seed}")
    trace = random_trace(draw)
    layout = replace(
        USUAL,
        stage=stage,
        ranks=draw.choice([1, 2, 4]),
        accumulation=draw.choice([1, 2, 5]),
        weight_bytes=draw.choice([2, 4]),
        staged=stage < 2 and draw.random() < 0.5,
        bucket=draw.choice([1, 3000, 1 << 30]),
    )
    found = replay(trace, layout)
    (heap,) = heaps
    trained = {event.number: event.size for event in trace if event.what is GRADIENT}
    parts = {number: -(-size // layout.shares) if stage == 3 else size for number, size in trained.items()}
    resting = [layout.weight_bytes * size for size in parts.values()] if not layout.flattens else []
    assert Counter(heap.live.values()) == Counter(resting + [replaying._SMALL] * len(trained)), (
        "what loading left is all there is"
    )
    w, whole = layout.weight_bytes, sum(trained.values())
    assert 0 <= found.gradients <= w * whole * layout.adds_whole
    assert found.gradients_at_end == w * whole * layout.adds_whole
    most = w * max(min(layout.bucket, whole), *trained.values()) if not layout.adds_whole else 0
    assert 0 <= found.bucket_at_end <= -(-most // PAGE) * PAGE
    made = [event.size for event in trace if event.what is MADE]
    assert 0 <= found.activations <= sum(made)
    assert min(found.gaps, found.gaps_at_end, found.gathered) >= 0
    if stage != 3 or layout.ranks == 1:
        assert found.gathered == 0, "who has everything gathers nothing"


def test_the_busiest_moment_is_told_item_by_item() -> None:
    trace = (
        Event(USED, 0, 1000),
        Event(MADE, 0, 60 * MIB),
        Event(MADE, 1, 40 * MIB),
        Event(FREED, 1, 0),
        Event(USED, 1, 500),
        Event(MADE, 2, 50 * MIB),
        Event(GRADIENT, 1, 500),
        Event(FREED, 2, 0),
        Event(GRADIENT, 0, 1000),
        Event(FREED, 0, 0),
    )
    one = replay(trace, replace(USUAL, stage=2))
    assert (one.activations, one.gathered, one.gradients) == (110 * MIB, 0, 0)
    assert (one.bucket, one.bucket_at_end) == (2 * PAGE, 2 * PAGE), "for 4 * 1500 bytes, from the second step on"
    assert one.gaps < MIB, "40 MiB were free when 50 were made, and hold them in part"
    for whole in (replace(USUAL, stage=1), replace(USUAL, stage=0, staged=True)):
        once, several = (replay(trace, replace(whole, accumulation=accumulation)) for accumulation in (1, 2))
        assert (once.gradients, several.gradients) == (0, 4 * 1500), "those of the micro-batch before are there"
        for one in (once, several):
            assert (one.bucket, one.bucket_at_end, one.gradients_at_end) == (0, 0, 4 * 1500)
    gathered = replay(trace, replace(USUAL, ranks=2))
    assert gathered.gathered == 4 * 1500, "both are gathered ahead"


def test_gradients_that_wait_lie_where_they_were_made_and_hold_the_heap(heaps: list[Witness]) -> None:
    size, others = SMALLEST_BYTES // 2, range(1, 25)
    made = tuple(Event(MADE, number, size) for number in others)
    freed = tuple(Event(FREED, number, 0) for number in others)
    weight = Event(USED, 0, size // 4)
    trace = (weight, *made, Event(MADE, 0, size), *freed, Event(GRADIENT, 0, size // 4), Event(FREED, 0, 0))
    waiting, reduced = (replay(trace, replace(USUAL, stage=stage, accumulation=2)) for stage in (1, 2))
    assert waiting.gaps_at_end > reduced.gaps_at_end + size
    assert [heap._keeps_end for heap in heaps] == [True, False]
    assert heaps[0].taken == heaps[1].taken + 2, "nothing but an empty place is taken for a gradient"


@pytest.mark.parametrize(("bucket", "written"), [(7500, 7500), (8000, 8000), (1 << 20, 8000)])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_bucket_is_written_as_far_as_it_goes(stage: int, bucket: int, written: int) -> None:
    trace = tuple(Event(what, number, 7000 - 6000 * number) for what in (USED, GRADIENT) for number in (0, 1))
    found = replay(trace, replace(USUAL, stage=stage, bucket=bucket)).bucket_at_end
    assert found == (4 * written if stage == 3 else -(-4 * written // PAGE) * PAGE)


def test_a_bucket_lies_on_pages_that_the_loss_has_freed() -> None:
    weight = 5 * MIB
    trace = (
        Event(USED, 0, weight),
        *(Event(MADE, number, 40 * MIB) for number in range(3)),
        *(Event(FREED, number, 0) for number in range(3)),
        Event(MADE, 3, 4 * weight),
        Event(GRADIENT, 0, weight),
        Event(FREED, 3, 0),
    )
    found = replay(trace, replace(USUAL, stage=2, accumulation=2))
    held = found.activations + found.bucket + found.gradients + found.gaps
    assert 120 * MIB <= held < 121 * MIB, "it asks for no page beside those of the three"
    assert found.bucket_at_end == 4 * weight


def test_what_weights_came_in_together_is_kept_until_the_last_of_them_is_used() -> None:
    weights = [Event(USED, number, MIB) for number in range(2)]
    trace = (
        weights[0], Event(MADE, 0, 40 * MIB), Event(FREED, 0, 0), weights[1], Event(MADE, 1, 30 * MIB), Event(FREED, 1, 0),
        Event(GRADIENT, 1, MIB), Event(GRADIENT, 0, MIB),
    )  # fmt: skip
    found = replay(trace, replace(USUAL, ranks=2))
    assert (found.activations, found.gathered) == (40 * MIB, 4 * MIB * (2 + 2)), "both weights, and the piece they came in"


def test_after_the_third_micro_batch_of_a_step_nothing_changes(heaps: list[Witness]) -> None:
    trace = random_trace(random.Random(3))
    layout = replace(USUAL, stage=1, accumulation=3)
    assert replay(trace, layout) == replay(trace, replace(layout, accumulation=64))
    assert heaps[0].taken == heaps[1].taken, "so they are not replayed"


@pytest.mark.parametrize("seed", range(6))
def test_a_heap_keeps_pieces_apart_and_joins_what_is_free(seed: int) -> None:
    draw = random.Random(seed)
    heap, live, number = Heap(), list[int](), 0
    for _ in range(400):
        if live and draw.random() < 0.48:
            heap.give(live.pop(draw.randrange(len(live))))
        else:
            heap.take(number, draw.choice([1, 100, 5000, 200 * KIB, 1 << 20, 30 << 20]), followed=draw.random() < 0.3)
            live.append(number)
            number += 1
        placed = sorted(piece for piece in heap._pieces.values() if piece[0] >= 0)
        assert heap.used_bytes == sum(size for _, size in placed)
        assert heap.paged_bytes == sum(size for begin, size in heap._pieces.values() if begin < 0)
        spans = sorted([(begin, begin + size) for begin, size in placed] + list(heap._gap_at.items()))
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans)), "nothing lies on another"
        assert {(end - begin, begin) for begin, end in heap._gap_at.items()} == set(heap._free)
        assert {end: begin for begin, end in heap._gap_at.items()} == heap._gap_to
        assert not set(heap._gap_at) & set(heap._gap_to), "gaps that touch are one"
        assert heap.resident_bytes == heap.used_bytes + heap.gap_bytes + heap.paged_bytes + heap.free_page_bytes
    for piece in list(heap._pieces):
        heap.give(piece)
    assert (heap.used_bytes, heap.paged_bytes) == (0, 0)


# -- a model that is followed


def followed(config: TuneConfig) -> ModelFacts:
    return facts_of(config, model_config_of(config), "fp32", on_gpu=False)


CONFIG = config_of(new={**NEW, "num_hidden_layers": 2})
ADAPTED = replace(CONFIG, lora=LoraConfig(rank=2), model=ModelConfig(path="x"))
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "recomputed": {"activations": ActivationConfig(checkpoint="device")},
    "whole logits": {"activations": ActivationConfig(loss_rows=0)},
    "packed": {"data": replace(CONFIG.data, packing="isolate")},
    "adapters": {"model": ModelConfig(path="x"), "lora": LoraConfig(rank=2)},
}


@pytest.mark.parametrize("case", CASES)
def test_a_followed_pass_meets_every_weight_once_and_leaves_nothing(case: str) -> None:
    config = replace(CONFIG, **CASES[case])
    looks = masking_utils.find_packed_sequence_indices
    facts = facts_of(config, model_config_of(CONFIG), "fp32", on_gpu=False)
    assert masking_utils.find_packed_sequence_indices is looks, "transformers is left as it was"
    used = {event.number: event.size for event in facts.trace if event.what is USED}
    graded = [event for event in facts.trace if event.what is GRADIENT]
    assert Counter(event.what for event in facts.trace)[USED] == len(used), "the first use alone is told"
    assert sum(used.values()) == facts.total
    assert sum(event.size for event in graded) == facts.trained
    assert len({event.number for event in graded}) == len(graded)
    if case == "adapters":
        assert 0 < facts.trained < facts.total / 10
    alive: dict[int, int] = {}
    seen: set[int] = set()
    for what, number, size in facts.trace:
        if what is MADE:
            assert number not in seen, "a number stands for one storage"
            seen.add(number)
            alive[number] = size
        elif what is FREED:
            del alive[number]
        elif what is GRADIENT:
            assert number in used
    assert not sum(alive.values()) > 1 << 20, "at the end little more than tables is left"
    assert replay(facts.trace, USUAL).activations <= facts.activation_bytes


def test_tied_weights_are_one_weight() -> None:
    tied = followed(config_of(new={**NEW, "num_hidden_layers": 1, "tie_word_embeddings": True}))
    untied = followed(config_of(new={**NEW, "num_hidden_layers": 1}))
    assert untied.total - tied.total == 512 * 64
    for facts in (tied, untied):
        assert sum(event.size for event in facts.trace if event.what is GRADIENT) == facts.total


def test_a_larger_batch_makes_larger_storages_and_no_more_of_them() -> None:
    small, large = (followed(replace(CONFIG, batch=BatchConfig(micro=micro))) for micro in (1, 4))
    assert Counter(event.what for event in small.trace) == Counter(event.what for event in large.trace)
    assert small.activation_bytes < large.activation_bytes <= 4 * small.activation_bytes
