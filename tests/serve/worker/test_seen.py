"""What a sequence has said, counted as it goes."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from serve.worker.sampling.seen import Seen


@pytest.mark.parametrize("prompt_tokens", [0, 3, 500])
def test_each_token_stands_once_with_how_often_it_was_generated(prompt_tokens: int) -> None:
    random.seed(prompt_tokens)
    token_ids = [random.randrange(900) for _ in range(prompt_tokens)]
    seen = Seen()
    for _ in range(40):
        seen.follow(token_ids, prompt_tokens)
        generated = Counter(token_ids[prompt_tokens:])
        assert dict(zip(seen.ids, seen.times, strict=True)) == {token: generated[token] for token in token_ids}
        assert len(seen.ids) == len(set(token_ids))
        token_ids += [random.randrange(900) for _ in range(random.choice([1, 2, 90]))]


@pytest.mark.parametrize("together", [1, 16, 17, 700])
def test_tokens_stand_in_order_however_many_come_together(together: int) -> None:
    random.seed(together)
    token_ids = [random.randrange(50_000) for _ in range(4_000)]
    seen = Seen()
    seen.follow(token_ids, 4_000)
    for _ in range(5):
        token_ids += [random.choice((token_ids[0], random.randrange(50_000))) for _ in range(together)]
        seen.follow(token_ids, 4_000)
        assert list(seen.ids) == sorted(set(token_ids))
        generated = Counter(token_ids[4_000:])
        assert list(seen.times) == [generated[token] for token in seen.ids]


def test_what_is_supposed_changes_nothing() -> None:
    seen = Seen()
    seen.follow([5, 3, 5, 700], 2)
    supposed = seen.supposing([3, 9])
    assert list(zip(supposed.ids, supposed.times, strict=True)) == [(3, 1), (5, 1), (9, 1), (700, 1)]
    assert dict(zip(seen.ids, seen.times, strict=True)) == {5: 1, 3: 0, 700: 1}
