"""A history that is not well is seen to be so."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve.types import SamplingParams
from tests.chaos.history import NUM_SCRIPTS, Call, judge, script, was_unavailable
from tests.support import reference
from tests.support.decisive import is_decisive
from tests.support.models import save

EXPECTED = {3: [7, 8, 9]}


def call(*, ids: list[int] | None = None, code: str | None = "OK", num_ends: int = 1) -> Call:
    return Call(3, [7, 8, 9] if ids is None else ids, code, num_ends)


def test_a_call_that_said_all_of_it_once_is_well() -> None:
    verdict = judge([call(), call()], EXPECTED)
    assert (verdict.calls, verdict.lost, verdict.wrong, verdict.excused) == (2, {}, 0, {})


@pytest.mark.parametrize(
    ("made", "lost", "wrong"),
    [
        (call(ids=[7, 8]), {}, 1),
        (call(ids=[7, 8, 9, 9]), {}, 1),
        (call(ids=[7, 7, 9]), {}, 1),
        (call(num_ends=0), {}, 1),
        (call(num_ends=2), {}, 1),
        (call(ids=[7], code="UNAVAILABLE", num_ends=0), {"UNAVAILABLE": 1}, 0),
        (call(ids=[8], code="UNAVAILABLE", num_ends=0), {"UNAVAILABLE": 1}, 1),
        (call(ids=[7], code=None, num_ends=0), {"never ended": 1}, 0),
    ],
)
def test_what_is_cut_short_doubled_or_lost_is_not(made: Call, lost: dict[str, int], wrong: int) -> None:
    verdict = judge([call(), made], EXPECTED)
    assert (verdict.lost, verdict.wrong) == (lost, wrong)


@pytest.mark.parametrize(
    ("made", "wrong"),
    [
        (call(code="UNAVAILABLE"), 0),
        (call(code="UNAVAILABLE", num_ends=2), 1),
        (call(ids=[7, 8], code="UNAVAILABLE"), 1),
        (call(ids=[7, 8, 8], code="UNAVAILABLE"), 1),
    ],
)
def test_a_call_whose_server_died_after_its_last_event_has_said_all_of_it(
    made: Call, wrong: int, capsys: pytest.CaptureFixture[str]
) -> None:
    verdict = judge([made], EXPECTED, was_unavailable)
    assert (verdict.lost, verdict.wrong, verdict.excused) == ({}, wrong, {"UNAVAILABLE": 1})
    assert judge([made], EXPECTED).wrong == 1, "where no server died it ends well"
    assert "wrong: Call(script=3" in capsys.readouterr().err


def test_no_two_scripts_are_alike_and_each_is_the_same_each_time() -> None:
    made = [script(number).SerializeToString() for number in range(NUM_SCRIPTS)]
    assert len(set(made)) == NUM_SCRIPTS
    assert made == [script(number).SerializeToString() for number in range(NUM_SCRIPTS)]


def test_an_answer_that_rounding_could_change_is_none_to_go_by(tmp_path: Path) -> None:
    model = reference.load(save("gpt_neox", tmp_path / "model"))
    prompt, greedy = (5, 6, 7), SamplingParams()
    answer = reference.greedy(model, prompt, 40)
    assert is_decisive(model, prompt, answer, greedy)
    assert not is_decisive(model, prompt, [*answer[:20], answer[20] + 1, *answer[21:]], greedy), (
        "another token than the likeliest"
    )
    nearest = reference.logprobs(model, [*prompt, *answer])[len(prompt) - 1].topk(2)
    (first, second), rival = nearest.values.tolist(), int(nearest.indices[1])
    tied = SamplingParams(logit_bias=((rival, first - second),))
    assert not is_decisive(model, prompt, answer, tied), "two tokens that are as likely"
