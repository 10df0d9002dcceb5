"""With whom a sequence shares its KV blocks."""

from __future__ import annotations

from collections.abc import Collection

from serve.engine.prefix_cache import DigestChain, PrefixCache
from serve.engine.sequence import LiveRequest, Sequence
from serve.types import BlockId, LengthRule


def chain_of(
    request: LiveRequest, token_ids: list[int], cache: PrefixCache, rule: LengthRule | None, *, with_all: bool
) -> DigestChain | None:
    """Under what digests one of a request's sequences, which has these tokens by now, finds and leaves blocks.

    Args:
        rule: how keys depend on a sequence's length, so that only such as have the same keys meet.
        with_all: whether sequences of other requests may be met; otherwise the request's own alone.

    Returns:
        ``None`` if there is nobody to share with.
    """
    if with_all:
        generation = request.generation
        root = cache.shared_root(generation.cache_salt, "" if generation.shares_cache else generation.tenant)
    elif request.generation.num_sequences > 1:
        root = cache.private_root(request.arrival)
    else:
        return None
    if rule is not None:
        root = cache.root_of_kind(root, rule.kind(rule.first_length(request.num_prompt_tokens, len(token_ids))))
    return DigestChain(root, token_ids, cache.block_tokens)


def is_being_made(seq: Sequence, cache: PrefixCache, making: Collection[set[bytes]]) -> bool:
    """Whether a step computes, for somebody else, the first block that a waiting sequence would have to.

    It finds the block in the cache when that has ended: prompts that arrive together and begin alike pay for that once.

    Args:
        making: digests of the blocks that steps fill which have not ended, and the one that is being planned.
    """
    if seq.chain is None or seq.wants_prompt_logprobs or not any(making):
        return False
    most = (len(seq.token_ids) - 1) // cache.block_tokens
    found = len(cache.lookup(seq.chain, most))
    if found == most:
        return False
    digest = seq.chain.digest(found)
    return any(digest in each for each in making)


def prefix_of(seq: Sequence, cache: PrefixCache, *, headroom: int) -> list[BlockId] | None:
    """The blocks that a waiting sequence finds in the cache; ``None`` if there is no room for the rest of what it knows.

    At most those before the last known token are found, so that there is always a position left to compute.

    Args:
        headroom: blocks that stay free.
    """
    pool, num_known = cache.pool, len(seq.token_ids)
    if pool.num_free <= headroom:
        return None
    hits: list[BlockId] = []
    if seq.chain is not None and not seq.wants_prompt_logprobs:
        hits = cache.lookup(seq.chain, (num_known - 1) // cache.block_tokens)
    available = pool.num_free - sum(pool.is_free(block) for block in hits)
    return hits if cache.blocks_for(num_known) - len(hits) + headroom <= available else None
