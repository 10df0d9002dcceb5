"""The pool against a model of itself that is too slow to be wrong."""

from __future__ import annotations

import random

import pytest

from serve.engine.block_pool import BlockPool
from serve.types import BlockId


def test_too_few_free_blocks_change_nothing() -> None:
    pool = BlockPool(3)
    assert pool.try_take(2) == [0, 1]
    assert pool.try_take(2) is None
    assert (pool.num_free, pool.num_used) == (1, 2)
    pool.check()


def test_the_empty_block_that_was_released_last_is_taken_first() -> None:
    """What was never touched stays so while there is other: memory that nobody needed is never given to the ranks."""
    pool = BlockPool(100)
    for _ in range(50):
        taken = pool.try_take(3)
        assert taken is not None
        assert set(taken) == {0, 1, 2}
        for block in taken:
            pool.release(block)


def test_empty_blocks_are_taken_before_kept_ones_and_the_longest_kept_first() -> None:
    pool = BlockPool(4)
    assert pool.try_take(3) == [0, 1, 2]
    for block in (BlockId(1), BlockId(0)):
        pool.mark(block)
        pool.release(block)
    pool.release(BlockId(2))
    assert pool.num_kept == 2
    assert pool.try_take(4) == [2, 3, 1, 0]
    assert not pool.is_marked(BlockId(0))


def test_a_kept_block_can_be_shared_again_and_is_free_after_its_last_holder() -> None:
    pool = BlockPool(1)
    pool.try_take(1)
    pool.mark(BlockId(0))
    pool.share(BlockId(0))
    pool.release(BlockId(0))
    assert not pool.is_free(BlockId(0))
    pool.release(BlockId(0))
    assert pool.is_free(BlockId(0))
    pool.share(BlockId(0))
    assert pool.num_free == 0
    pool.check()


def test_broken_promises_are_assertions_with_a_sentence() -> None:
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="block 0 was released more often than it was taken"):
        pool.release(BlockId(0))
    with pytest.raises(AssertionError, match="block 0 is free and empty: it cannot be shared"):
        pool.share(BlockId(0))
    with pytest.raises(AssertionError, match="block 0 is free: what it holds cannot become worth keeping"):
        pool.mark(BlockId(0))
    with pytest.raises(AssertionError, match="block 0 is not marked as kept"):
        pool.unmark(BlockId(0))
    with pytest.raises(AssertionError, match="a pool of 0 blocks"):
        BlockPool(0)


@pytest.mark.parametrize("seed", range(20))
def test_random_operations_keep_the_invariants(seed: int) -> None:
    rng = random.Random(seed)
    pool = BlockPool(rng.randint(1, 12))
    held: dict[BlockId, int] = {}
    for _ in range(250):
        operation = rng.choice(("take", "share", "release", "release", "mark", "unmark"))
        marked = [BlockId(b) for b in range(pool.num_blocks) if pool.is_marked(BlockId(b))]
        if operation == "take":
            count = rng.randint(0, 4)
            taken = pool.try_take(count)
            assert (taken is None) == (count > pool.num_blocks - len(held))
            for block in taken or ():
                assert block not in held, f"block {block} was given out twice"
                held[block] = 1
        elif operation == "share" and (held or marked):
            block = rng.choice([*held, *marked])
            pool.share(block)
            held[block] = held.get(block, 0) + 1
        elif operation == "release" and held:
            block = rng.choice(list(held))
            pool.release(block)
            held[block] -= 1
            if not held[block]:
                del held[block]
        elif operation == "mark" and held:
            pool.mark(rng.choice(list(held)))
        elif operation == "unmark" and marked:
            pool.unmark(rng.choice(marked))
        pool.check()
        pool.check_references(held)
        assert pool.num_used == len(held)
