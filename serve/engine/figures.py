"""The figures of one moment, gathered from the engine's parts."""

from __future__ import annotations

from serve.engine.prefix_cache import PrefixCache
from serve.engine.registry import Registry
from serve.engine.scheduler import Scheduler
from serve.engine.stats import EngineStats, StepTotals, stats_of_tenants


def figures(
    scheduler: Scheduler,
    registry: Registry,
    cache: PrefixCache,
    totals: StepTotals,
    *,
    caches: bool,
    tokens: tuple[int, int],
) -> EngineStats:
    """What the engine tells of itself. Costs the same however many requests the tenants have.

    Args:
        caches: whether prompts of different requests share blocks.
        tokens: of prompts that were computed, and generated ones.
    """
    running, queue = scheduler.num_running_requests, registry.queue
    return EngineStats(
        num_running=running,
        num_waiting=len(registry) - running,
        queued_requests=queue.requests,
        queued_tokens=queue.tokens,
        queued_since_seconds=queue.since_seconds,
        kv_blocks_used=cache.pool.num_used,
        kv_blocks_cached=cache.pool.num_kept,
        kv_blocks_total=cache.pool.num_blocks,
        preemptions=scheduler.preemptions,
        recomputed=scheduler.recomputed,
        prefix_cache_queries=scheduler.cache_queries if caches else 0,
        prefix_cache_hits=scheduler.cache_hits if caches else 0,
        prompt_tokens=tokens[0],
        generation_tokens=tokens[1],
        proposed_tokens=scheduler.proposed_tokens,
        accepted_tokens=scheduler.accepted_tokens,
        tenants=stats_of_tenants(scheduler.places.taken, queue.requests_of),
        steps=totals.steps,
        steps_overtaken=totals.overtaken,
        last_step=totals.last,
    )
