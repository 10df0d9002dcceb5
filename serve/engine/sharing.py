"""With whom a sequence shares its KV blocks."""

from __future__ import annotations

from collections.abc import Collection

from serve.engine.prefix_cache import DigestChain, PrefixCache
from serve.engine.sequence import LiveRequest, Sequence
from serve.types import LengthRule


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
