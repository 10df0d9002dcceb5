"""What can be found in the cache, by whom, and until when."""

from __future__ import annotations

import pytest

from serve.engine.prefix_cache import DigestChain, PrefixCache

SIZE = 4


def filled(cache: PrefixCache, root: bytes, token_ids: list[int]) -> DigestChain:
    """Compute a sequence into the cache and let go of its blocks."""
    chain = DigestChain(root, token_ids, SIZE)
    table = cache.try_take(cache.blocks_for(len(token_ids)))
    assert table is not None
    for index in range(len(token_ids) // SIZE):
        cache.register(chain.digest(index), table[index])
    cache.release(table)
    cache.check()
    return chain


def found(cache: PrefixCache, root: bytes, token_ids: list[int]) -> int:
    return len(cache.lookup(DigestChain(root, token_ids, SIZE), len(token_ids) // SIZE))


def test_only_the_equal_prefix_is_found_and_only_in_full_blocks() -> None:
    cache = PrefixCache(8, SIZE)
    root = cache.shared_root("")
    filled(cache, root, list(range(10)))
    assert found(cache, root, list(range(12))) == 2
    assert found(cache, root, [*range(7), 99]) == 1
    assert found(cache, root, [99, *range(1, 10)]) == 0
    assert found(cache, root, [*range(4, 8), *range(4, 8)]) == 0, "a block is not its tokens alone, but all before them too"


def test_nobody_else_finds_a_salted_or_private_block() -> None:
    cache = PrefixCache(8, SIZE)
    ids = list(range(8))
    filled(cache, cache.shared_root("mine"), ids)
    assert found(cache, cache.shared_root("mine"), ids) == 2
    for root in (cache.shared_root(""), cache.shared_root("yours"), cache.private_root(0), cache.shared_root("\ud800")):
        assert found(cache, root, ids) == 0
    assert cache.private_root(0) != cache.private_root(1)
    assert cache.shared_root("request:0") != cache.private_root(0)


def test_digests_cannot_be_foretold_from_outside_the_process() -> None:
    assert PrefixCache(1, SIZE).shared_root("") != PrefixCache(1, SIZE).shared_root("")
    assert PrefixCache(1, SIZE, key=b"k").shared_root("") == PrefixCache(1, SIZE, key=b"k").shared_root("")


def test_a_prefix_is_overwritten_from_its_tail() -> None:
    cache = PrefixCache(3, SIZE)
    root, ids = cache.shared_root(""), list(range(12))
    filled(cache, root, ids)
    for left in (2, 1, 0):
        assert cache.try_take(1) is not None
        assert found(cache, root, ids) == left
        cache.check()
    assert cache.try_take(1) is None


def test_two_blocks_with_the_same_contents_leave_the_first_one_registered() -> None:
    cache = PrefixCache(4, SIZE)
    chain = DigestChain(cache.shared_root(""), list(range(4)), SIZE)
    table = cache.try_take(2)
    assert table is not None
    cache.register(chain.digest(0), table[0])
    cache.register(chain.digest(0), table[1])
    cache.check()
    assert cache.lookup(chain, 1) == [table[0]]


def test_a_flush_forgets_contents_and_keeps_holders() -> None:
    cache = PrefixCache(4, SIZE)
    root, ids = cache.shared_root(""), list(range(8))
    chain = filled(cache, root, ids)
    (first,) = cache.lookup(chain, 1)
    cache.pool.share(first)
    assert cache.flush() == 2
    assert (cache.pool.num_used, cache.pool.num_kept) == (1, 0)
    assert found(cache, root, ids) == 0
    cache.check()
    cache.release([first])
    cache.check()


def test_digests_follow_a_growing_sequence() -> None:
    ids = list(range(4))
    chain = DigestChain(b"root", ids, SIZE)
    first = chain.digest(0)
    with pytest.raises(AssertionError, match="block 1 is not full: it has 0 of 4 tokens"):
        chain.digest(1)
    ids.extend(range(4, 8))
    assert chain.digest(0) == first
    assert chain.digest(1) == DigestChain(b"root", list(range(8)), SIZE).digest(1)
