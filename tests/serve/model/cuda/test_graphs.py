"""What may be captured, how a captured step is replayed on the CPU, and attention whose shapes depend on no length."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import Tensor

from serve.model.attention import LayerCache, ScoreRules, StepLayout, TorchBackend
from serve.model.cuda.graphs import CaptureError, CpuGraph, CudaGraph, graph_sizes, graphs_of, size_for
from serve.model.cuda.static import StaticTorchBackend
from tests.serve.model.cuda.cases import CASES, Case


def test_sizes_are_few_and_the_largest_is_the_most_that_is_wanted() -> None:
    assert graph_sizes(1) == (1,)
    assert graph_sizes(3) == (1, 2, 3)
    assert graph_sizes(8) == (1, 2, 4, 8)
    assert graph_sizes(40) == (1, 2, 4, 8, 16, 32, 40)
    assert graph_sizes(64) == (1, 2, 4, 8, 16, 32, 48, 64)
    assert len(graph_sizes(256)) == 20


def test_a_step_gets_the_least_size_that_has_room_for_it() -> None:
    for most in (1, 5, 16, 100, 256):
        sizes = graph_sizes(most)
        for rows in range(1, most + 1):
            assert size_for(sizes, rows) == min(size for size in sizes if size >= rows)
        assert size_for(sizes, most + 1) is None


def _looks(x: Tensor) -> Tensor:
    return x * 2 if x.sum().item() > 0 else x


@pytest.mark.parametrize(
    "step",
    [
        _looks, lambda x: x * bool(x.any()), lambda x: x[x > 0], lambda x: x.nonzero(), lambda x: x.masked_select(x > 0),
        lambda x: x + torch.tensor([1.0, 2.0, 3.0]), lambda x: x[[0, 1]], lambda x: x.unique(),
        lambda x: x.repeat_interleave(x.long().abs()), lambda x: x.masked_fill_(x > 0, 1.0).index_put_((x > 0,), x[0]),
        lambda x: x.histc(4), lambda x: x.histc(1, min=0, max=0),
    ],
    ids=[
        "item", "bool", "mask", "nonzero", "masked_select", "numbers of the host", "an index of the host", "unique", "repeat",
        "put by a mask", "histogram", "histogram of one number",
    ],
)  # fmt: skip
def test_a_step_that_waits_for_the_device_or_brings_numbers_of_the_host_is_not_captured(
    step: Callable[[Tensor], Tensor],
) -> None:
    x = torch.tensor([1.0, -2.0, 3.0])
    with pytest.raises(CaptureError, match="cannot be captured"):
        CpuGraph().capture(lambda: (step(x),))


def test_a_histogram_of_a_range_that_is_told_is_captured() -> None:
    x = torch.tensor([1.0, -2.0, 3.0])
    (counts,) = CpuGraph().capture(lambda: (x.histc(4, min=0, max=3),))
    assert counts.tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("error", "told_as"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB."), torch.OutOfMemoryError),
        (torch.AcceleratorError("CUDA error: out of memory\nmore"), torch.OutOfMemoryError),
        (torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing"), CaptureError),
    ],
)
def test_a_capture_without_memory_is_told_apart_from_a_step_that_no_graph_can_hold(
    error: Exception, told_as: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> tuple[Tensor, ...]:
        raise error

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
    with pytest.raises(told_as, match=re.escape(str(error).partition("\n")[0])):
        CudaGraph(None).capture(fails)


@pytest.mark.parametrize(
    ("first", "told_as"),
    [
        (torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing"), CaptureError),
        (RuntimeError("CUDA driver error: CUDA_ERROR_OUT_OF_MEMORY"), torch.OutOfMemoryError),
        (ValueError("no such size"), CaptureError),
    ],
)
def test_what_broke_a_capture_off_is_told_and_not_alone_that_it_was_broken_off(
    first: Exception, told_as: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch has it, which ends the capture first."""

    @contextmanager
    def graph(*_: object, **__: object) -> Iterator[None]:
        try:
            yield
        finally:
            raise torch.AcceleratorError("CUDA error: operation failed due to a previous error during capture")

    def fails() -> tuple[Tensor, ...]:
        raise first

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    with pytest.raises(told_as, match=f"^{re.escape(str(first))}") as told:
        CudaGraph(None).capture(fails)
    assert (told_as is torch.OutOfMemoryError) != ("a previous error during capture" in str(told.value))


def test_a_replay_computes_anew_from_what_its_inputs_hold_then() -> None:
    given, kept = torch.zeros(4, 3), torch.zeros(2)

    def step() -> tuple[Tensor, Tensor]:
        wide = torch.empty(4, 3)
        wide.copy_(given)
        wide.t().view(3, 4)[0].add_(1.0)  # in place, by a view of a view
        parts = wide.chunk(2, dim=0)
        kept.add_(parts[1].sum(dim=0)[:2])
        return torch.cat([part * 2 for part in parts]), parts[0].relu_().sum(dim=1)

    graph = CpuGraph()
    results = graph.capture(step)
    for seed in range(3):
        given.copy_(torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)))
        before = kept.clone()
        graph.replay()
        replayed, changed = [result.clone() for result in results], kept.clone()
        kept.copy_(before)
        assert [torch.equal(*pair) for pair in zip(replayed, step(), strict=True)] == [True, True]
        assert torch.equal(kept, changed)


def test_what_python_computed_stays_as_it_was_as_in_a_cuda_graph() -> None:
    x, factor = torch.ones(2), [2.0]
    graph = CpuGraph()
    (result,) = graph.capture(lambda: (x * factor[0],))
    factor[0] = 5.0
    graph.replay()
    assert result.tolist() == [2.0, 2.0]


def test_a_replay_spoils_what_graphs_that_were_captured_later_gave_and_nothing_else() -> None:
    """As it may on CUDA, where graphs share memory: so a test sees who reads what another replay may have overwritten."""
    x, make = torch.ones(2), graphs_of(torch.device("cpu"))
    first, second, third = make(), make(), make()
    (before,) = first.capture(lambda: (x + 1,))
    numbers, places, truth, same = second.capture(lambda: (before * 2, before.argmax(), before > 1, x.view(1, 2)))
    (last,) = third.capture(lambda: (numbers + 1,))
    second.replay()
    assert (before.tolist(), numbers.tolist(), last.isnan().all()) == ([2.0, 2.0], [4.0, 4.0], True)
    third.replay()
    assert last.tolist() == [5.0, 5.0]
    first.replay()
    assert before.tolist() == [2.0, 2.0]
    assert (numbers.isnan().all(), places.item(), truth.any(), last.isnan().all()) == (True, -1, False, True)
    assert same.tolist() == [[1.0, 1.0]], "an input is nobody's result"
    other = graphs_of(torch.device("cpu"))()
    (apart,) = other.capture(lambda: (x * 3,))
    first.replay()
    assert apart.tolist() == [3.0, 3.0], "of another pool"


DECODING = {name: case for name, case in CASES.items() if "prefill" not in name and case.splits == 1 and not case.padded}


def _attended(case: Case, seed: int, padded: int, *, window_of_nans: bool) -> tuple[Tensor, Tensor, LayerCache, LayerCache]:
    """What both back ends make of one token each of some sequences: static with padded rows, and plain without."""
    draw, source = random.Random(seed), torch.Generator().manual_seed(seed)
    size, lengths = case.block_tokens, [draw.randint(1, 75) for _ in range(4)]
    width = -(-80 // size)
    blocks = draw.sample(range(1, 4 * width + 1), 4 * width)
    shape = (4 * width + 1, case.kv_heads)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=source).to(case.dtype)

    kept_in = torch.float8_e4m3fn if case.fp8 else case.dtype
    keys, values = normal(*shape, case.head_dim, size), normal(*shape, size, case.head_dim)
    tables = torch.zeros(4 + padded, width, dtype=torch.int32)
    for i, length in enumerate(lengths):
        held = blocks[i * width : (i + 1) * width]
        tables[i] = torch.tensor(held, dtype=torch.int32)
        if window_of_nans:  # what lies behind a sequence's end may be anything
            for position in range(length, width * size):
                keys[held[position // size], :, :, position % size] = torch.nan
                values[held[position // size], :, position % size] = torch.nan
    slots = [int(tables[i, (n - 1) // size]) * size + (n - 1) % size for i, n in enumerate(lengths)]
    rules = ScoreRules(
        softcap=case.softcap,
        sinks_H=normal(case.heads).float() if case.sinks else None,
        bias_HL=normal(case.heads, width * size).float() if case.bias else None,
    )
    tokens = 4 + padded
    query, key, value = (normal(tokens, heads, case.head_dim) for heads in (case.heads, case.kv_heads, case.kv_heads))
    found, caches = [], []
    for backend, rows in ((StaticTorchBackend(), tokens), (TorchBackend(), 4)):
        layout = StepLayout(
            slots=torch.tensor((slots + [-1] * padded)[:rows]),
            positions=torch.tensor([n - 1 for n in lengths] + [-1] * padded, dtype=torch.int32)[:rows],
            query_starts=tuple(range(rows + 1)),
            context_lengths=tuple(lengths),
            block_tables=tables,
            table_rows=tuple(range(rows)),
        )
        caches.append(LayerCache(keys.to(kept_in, copy=True), values.to(kept_in, copy=True)))
        found.append(
            backend.attend(
                query[:rows], key[:rows], value[:rows], caches[-1], layout,
                scale=case.head_dim**-0.5, window=case.window, rules=rules,
            )
        )  # fmt: skip
    return found[0], found[1], caches[0], caches[1]


@pytest.mark.parametrize("name", DECODING)
def test_attention_in_the_whole_width_of_the_tables_is_attention(name: str) -> None:
    case = DECODING[name]
    wide, plain, cache, expected = _attended(case, seed=len(name), padded=3, window_of_nans=True)
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[case.dtype]
    torch.testing.assert_close(wide[:4], plain, atol=tolerance, rtol=tolerance)
    assert wide[4:].count_nonzero() == 0, "a row without a sequence gives zeros"
    for found, wanted in ((cache.keys, expected.keys), (cache.values, expected.values)):
        torch.testing.assert_close(found.float(), wanted.float(), atol=0, rtol=0, equal_nan=True)


def test_a_step_of_no_sequence_writes_nothing() -> None:
    source = torch.Generator().manual_seed(1)
    layer = LayerCache(torch.randn(3, 2, 8, 4, generator=source), torch.randn(3, 2, 4, 8, generator=source))
    before = layer.keys.clone(), layer.values.clone()
    layout = StepLayout(
        slots=torch.full((2,), -1), positions=torch.full((2,), -1, dtype=torch.int32), query_starts=(0, 1, 2),
        context_lengths=(8, 8), block_tables=torch.zeros(2, 2, dtype=torch.int32), table_rows=(0, 1),
    )  # fmt: skip
    given = torch.randn(3, 2, 2, 8, generator=source)
    out = StaticTorchBackend().attend(*given, layer, layout, scale=1.0, window=0)
    assert out.count_nonzero() == 0
    assert torch.equal(layer.keys, before[0])
    assert torch.equal(layer.values, before[1])
