"""What is proposed to follow the tokens of a running sequence, and the blocks for it."""

from __future__ import annotations

from serve.engine.prefix_cache import PrefixCache
from serve.engine.sequence import Sequence
from serve.engine.speculation import Speculation


def proposal(seq: Sequence, speculation: Speculation, spare: int, cache: PrefixCache, *, keep: int) -> tuple[int, ...]:
    """Tokens that may follow what a sequence knows, which owes one position and has the block for it. It gets blocks for them.

    The last token that it may generate is never computed, so it is not proposed either. A guess may take what is left of the
    sequence's blocks, and more only of those that nobody is to find taken.

    Args:
        spare: how many tokens may still be proposed in this step.
        keep: blocks that stay free.
    """
    num_tokens, size = len(seq.token_ids), cache.block_tokens
    if spare <= 0 or speculation.rests(num_tokens) or seq.debt != 1:
        return ()
    request = seq.request
    still_to_come = request.num_prompt_tokens + request.rule.max_new_tokens - num_tokens
    free = max(0, cache.pool.num_free - keep)
    room = min(still_to_come - 1, spare, (len(seq.table) + free) * size - num_tokens)
    proposed = speculation.propose(seq.token_ids, room)
    missing = cache.blocks_for(num_tokens + len(proposed)) - len(seq.table)
    if missing > 0:
        blocks = cache.try_take(missing)
        assert blocks is not None, "room was reckoned by the free blocks"
        seq.table += blocks
    speculation.proposed += len(proposed)
    return proposed
