"""The last layer computes what is read of it, in every family, and a cache holds afterwards what it holds without that."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from serve.engine.plan import Span, Start, StepPlan
from serve.model.attention import PagedAttention
from serve.types import BlockId, SamplingParams, SequenceId
from serve.worker import loader
from serve.worker.batch import Batch, SequenceTable
from serve.worker.loader import RankModel
from serve.worker.parallel import Ranks
from serve.worker.runner import Runner
from tests.serve.worker.family_worker import BLOCK_TOKENS, load
from tests.serve.worker.test_family_parity import CASES
from tests.support.kernels import cpu_kernels
from tests.support.models import save

SIZES = (45, 13, 30)
PROMPTS = tuple(tuple((5 * place * place + 3 * seed) % 500 + 1 for place in range(size)) for seed, size in enumerate(SIZES))
ROWS = sum(SIZES)
ENDS = (44, 57, 87)
"""The last row of each prompt, one after the other in one step."""
BLOCKS_EACH = -(-max(SIZES) // BLOCK_TOKENS)


def step_of(model: RankModel, *, ends: bool = True, prompt_logprobs: int | None = None) -> Batch:
    """All prompts in one step, in which they end or do not; of the second more may be told."""
    starts, spans = [], []
    for number, prompt in enumerate(PROMPTS):
        start = Start(
            sequence=SequenceId(number),
            index=0,
            token_ids=prompt if ends else (*prompt, 1),
            num_prompt_tokens=len(prompt) + (not ends),
            sampling=SamplingParams(),
            prompt_logprobs=prompt_logprobs if number == 1 else None,
        )
        blocks = tuple(BlockId(number * BLOCKS_EACH + block) for block in range(BLOCKS_EACH))
        starts.append(start)
        spans.append(Span(sequence=SequenceId(number), start=0, count=len(prompt), new_blocks=blocks, sample=ends))
    table = SequenceTable(BLOCK_TOKENS, model.device, model.facts.length_rule)
    batch = table.apply(StepPlan(step=0, starts=tuple(starts), spans=tuple(spans)))
    assert batch is not None
    return batch


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Of each call of attention: how many tokens it was given, and how many sequences."""
    seen: list[tuple[int, int]] = []
    call: Callable[..., torch.Tensor] = PagedAttention.__call__

    def follow(self: PagedAttention, *inputs: object) -> torch.Tensor:
        assert self.state.layout is not None
        seen.append((self.state.layout.slots.numel(), len(self.state.layout.table_rows)))
        return call(self, *inputs)

    monkeypatch.setattr(PagedAttention, "__call__", follow)
    return seen


@torch.inference_mode()
def computed(model: RankModel, batch: Batch) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Last hidden states of a step, and the keys and values of its positions; the cache is zeros afterwards."""
    hidden_TE = Runner(model, Ranks(0, 1))._compute(batch)[0].clone()
    kept = []
    for cache in model.caches:
        for number, size in enumerate(SIZES):
            table = torch.arange(number * BLOCKS_EACH, (number + 1) * BLOCKS_EACH)
            kept += [part_GLD[:, :size].clone() for part_GLD in cache.read(table, torch.float32)]
        cache.keys.zero_()
        cache.values.zero_()
    return hidden_TE, kept


@pytest.mark.parametrize("case", CASES)
def test_rows_that_are_read_are_what_they_are_where_all_are_computed(
    case: str, tmp_path: Path, calls: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    cpu_kernels()
    family, changes = CASES[case]
    save(family, tmp_path / "model", with_tokenizer=False, **changes)
    model = load(tmp_path / "model", 1, Ranks(0, 1))
    batch, layers = step_of(model), len(model.caches)
    assert batch.read_rows == ENDS
    few_TE, few = computed(model, batch)
    assert calls == [(ROWS, 3)] * (layers - 1) + [(ROWS, 0), (3, 3)]
    monkeypatch.setattr(Batch, "read_rows", tuple(range(ROWS)))
    all_TE, whole = computed(model, batch)
    assert calls[layers + 1 :] == [(ROWS, 3)] * layers
    torch.testing.assert_close(few_TE[list(ENDS)], all_TE[list(ENDS)], atol=2e-5, rtol=2e-5)
    for mine, other in zip(few, whole, strict=True):
        torch.testing.assert_close(mine, other, atol=2e-5, rtol=2e-5)
        assert mine.any()


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    torch.set_num_threads(1)
    save("llama", tmp_path / "model", with_tokenizer=False, num_hidden_layers=2)
    return tmp_path / "model"


def test_plain_attention_is_asked_the_same(llama: Path, calls: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "load_kernels", lambda *_: None)
    model = load(llama, 1, Ranks(0, 1))
    batch = step_of(model)
    few_TE, few = computed(model, batch)
    assert calls == [(ROWS, 3), (ROWS, 0), (3, 3)]
    monkeypatch.setattr(Batch, "read_rows", tuple(range(ROWS)))
    all_TE, whole = computed(model, batch)
    torch.testing.assert_close(few_TE[list(ENDS)], all_TE[list(ENDS)], atol=2e-5, rtol=2e-5)
    for mine, other in zip(few, whole, strict=True):
        torch.testing.assert_close(mine, other, atol=2e-5, rtol=2e-5)


def test_prompts_that_go_on_leave_keys_and_values_alone(llama: Path, calls: list[tuple[int, int]]) -> None:
    model = load(llama, 1, Ranks(0, 1))
    batch = step_of(model, ends=False)
    assert batch.read_rows == ()
    few = computed(model, batch)[1]
    assert calls == [(ROWS, 3), (ROWS, 0), (1, 1)]
    for mine, other in zip(few, computed(model, step_of(model))[1], strict=True):
        torch.testing.assert_close(mine, other, atol=2e-5, rtol=2e-5)


def test_rows_whose_logprobs_are_told_are_read(llama: Path, calls: list[tuple[int, int]]) -> None:
    model = load(llama, 1, Ranks(0, 1))
    batch = step_of(model, prompt_logprobs=0)
    assert batch.read_rows == (44, *range(45, 58), 87)
    computed(model, batch)
    assert calls == [(ROWS, 3), (ROWS, 0), (15, 3)]


@pytest.mark.parametrize("with_kernels", [True, False])
def test_rows_that_follow_one_another_read_their_sequence_together(
    llama: Path, calls: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, with_kernels: bool
) -> None:
    if not with_kernels:
        monkeypatch.setattr(loader, "load_kernels", lambda *_: None)
    model = load(llama, 1, Ranks(0, 1))
    batch, rows = step_of(model), (3, 4, 5, 43, 44, 45, 46, 70, 72, 73)
    monkeypatch.setattr(Batch, "read_rows", rows)
    few_TE, few = computed(model, batch)
    assert calls == [(ROWS, 3), (ROWS, 0), (len(rows), 5)]
    monkeypatch.setattr(Batch, "read_rows", tuple(range(ROWS)))
    all_TE, whole = computed(model, batch)
    torch.testing.assert_close(few_TE[list(rows)], all_TE[list(rows)], atol=2e-5, rtol=2e-5)
    for mine, other in zip(few, whole, strict=True):
        torch.testing.assert_close(mine, other, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("rows", [range(ROWS // 2 + 1), range(ROWS - 15)])
def test_a_step_in_which_most_rows_are_read_is_computed_at_once(
    llama: Path, calls: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, rows: range
) -> None:
    model = load(llama, 1, Ranks(0, 1))
    monkeypatch.setattr(Batch, "read_rows", tuple(rows))
    computed(model, step_of(model))
    assert calls == [(ROWS, 3)] * 2
