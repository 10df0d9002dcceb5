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


def test_all_but_the_latest_tokens_stand_in_order() -> None:
    random.seed(0)
    token_ids = random.sample(range(50_000), 4_000)
    seen = Seen()
    seen.follow(token_ids, 4_000)
    assert list(seen.ids) == sorted(token_ids)
    for _ in range(1_100):
        token_ids.append(random.randrange(50_000))
        seen.follow(token_ids, 4_000)
        descents = sum(second < first for first, second in zip(seen.ids, seen.ids[1:], strict=False))
        assert descents <= 1_000 + 64
    assert list(seen.ids[:4_900]) == sorted(seen.ids[:4_900]), "they were put in order again"


def test_what_is_supposed_changes_nothing() -> None:
    seen = Seen()
    seen.follow([5, 3, 5, 700], 2)
    supposed = seen.supposing([3, 9])
    assert dict(zip(supposed.ids, supposed.times, strict=True)) == {5: 1, 3: 1, 700: 1, 9: 1}
    assert dict(zip(seen.ids, seen.times, strict=True)) == {5: 1, 3: 0, 700: 1}
