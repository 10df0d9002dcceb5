"""The heap against a sorted list."""

from __future__ import annotations

import random

import pytest

from serve.engine.lazy_heap import LazyHeap


def drained(heap: LazyHeap[str]) -> list[str]:
    items = []
    while (item := heap.first()) is not None:
        items.append(item)
        heap.discard(item)
    return items


def test_equal_keys_come_in_the_order_of_their_pushes() -> None:
    heap: LazyHeap[str] = LazyHeap()
    for item, key in (("b", 1.0), ("a", 1.0), ("c", 0.0), ("d", 1.0)):
        heap.push(item, (key,))
    assert heap.first_key() == (0.0,)
    assert drained(heap) == ["c", "b", "a", "d"]
    assert heap.first_key() is None


def test_an_item_that_comes_back_counts_with_its_new_key_only() -> None:
    heap: LazyHeap[str] = LazyHeap()
    heap.push("a", (1.0,))
    heap.push("b", (2.0,))
    assert heap.discard("a")
    assert not heap.discard("a")
    heap.push("a", (3.0,))
    heap.check()
    assert drained(heap) == ["b", "a"]


def test_an_item_is_pushed_once() -> None:
    heap: LazyHeap[str] = LazyHeap()
    heap.push("a", (1.0,))
    with pytest.raises(AssertionError, match="'a' is in the heap already"):
        heap.push("a", (2.0,))


@pytest.mark.parametrize("seed", range(10))
def test_random_operations_agree_with_a_sorted_list(seed: int) -> None:
    rng = random.Random(seed)
    heap: LazyHeap[int] = LazyHeap()
    model: dict[int, tuple[float, int]] = {}
    for serial in range(1000):
        item = rng.randrange(200)
        if item in model:
            assert item in heap
            assert heap.discard(item)
            del model[item]
        elif rng.random() < 0.6:
            model[item] = (float(rng.randrange(20)), serial)
            heap.push(item, model[item][:1])
        assert len(heap) == len(model)
        assert heap.first() == (min(model, key=lambda i: model[i]) if model else None)
        heap.check()
