"""Which ids end a sequence, and from when on."""

from __future__ import annotations

from serve.engine.stopping import StopRule
from serve.types import FinishReason, StoppingParams


def test_eos_goes_before_a_stop_id_and_both_before_nothing() -> None:
    rule = StopRule(StoppingParams(max_new_tokens=9, stop_ids=(5, 6)), eos_ids=(5, 7))
    for token_id, reason in ((5, FinishReason.EOS), (7, FinishReason.EOS), (6, FinishReason.STOP_ID)):
        stop = rule.by_id(token_id, 1)
        assert stop is not None
        assert (stop.reason, stop.matched, stop.is_by_id) == (reason, token_id, True)
    assert rule.by_id(8, 1) is None
    assert rule.end_ids == {5, 6, 7}


def test_an_ignored_eos_ends_nothing_unless_it_is_a_stop_id_too() -> None:
    rule = StopRule(StoppingParams(max_new_tokens=9, stop_ids=(5,), ignore_eos=True), eos_ids=(5, 7))
    assert rule.by_id(7, 1) is None
    stop = rule.by_id(5, 1)
    assert stop is not None
    assert stop.reason is FinishReason.STOP_ID
    assert rule.end_ids == {5}


def test_no_id_ends_a_sequence_among_its_first_min_new_tokens() -> None:
    rule = StopRule(StoppingParams(max_new_tokens=9, min_new_tokens=2), eos_ids=(5,))
    assert [rule.by_id(5, count) is not None for count in (1, 2, 3)] == [False, False, True]
