"""What the demo reads from the server's ``/metrics``."""

from __future__ import annotations

import urllib.request
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True, slots=True)
class Reading:
    """One scrape; counters since the server started."""

    generation_tokens: int
    first_token_seconds: float
    """Sum of the times to first token of all requests."""
    num_first_tokens: int
    kv_blocks_used: int
    kv_blocks_total: int


def read(url: str) -> Reading:
    """Scrape the endpoint. Raises ``OSError`` if it does not answer and ``KeyError`` if a metric is missing."""
    with urllib.request.urlopen(url, timeout=5) as response:
        text = response.read().decode()
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.endswith("_bucket"):
                samples[sample.name] = samples.get(sample.name, 0.0) + sample.value
    return Reading(
        generation_tokens=int(samples["tessera_generation_tokens_total"]),
        first_token_seconds=samples["tessera_time_to_first_token_seconds_sum"],
        num_first_tokens=int(samples["tessera_time_to_first_token_seconds_count"]),
        kv_blocks_used=int(samples["tessera_kv_blocks_used"]),
        kv_blocks_total=int(samples["tessera_kv_blocks"]),
    )
