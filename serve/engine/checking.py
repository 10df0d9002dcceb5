"""What must always hold of the running batch. For tests."""

from __future__ import annotations

from collections.abc import Mapping

from serve.engine.prefix_cache import PrefixCache
from serve.engine.sequence import Sequence
from serve.types import BlockId, SequenceId


def check_batch(running: Mapping[SequenceId, Sequence], cache: PrefixCache, *, num_under_way: int, num_places: int) -> None:
    """Assert that running sequences owe what they may, hold the blocks that are held, and are in order of admission.

    Args:
        num_under_way: steps that the ranks were given and have not answered.
        num_places: how many may go on in the next one.
    """
    assert sum(seq.debt > 0 for seq in running.values()) <= num_places, "more sequences run than may"
    held, last = dict[BlockId, int](), next(reversed([*running]), None)
    for seq in running.values():
        is_youngest = seq.id == last
        seq.check_running(is_youngest=is_youngest, num_under_way=num_under_way, block_tokens=cache.block_tokens)
        for block in seq.table:
            held[block] = held.get(block, 0) + 1
    cache.pool.check_references(held)
    assert [*running.values()] == sorted(running.values(), key=lambda seq: seq.admitted), "batch out of order"
