"""Who is to blame when ranks fall silent while the model is loaded, or hang in a step."""

from __future__ import annotations

import socket
import sys
import types
from collections.abc import Iterator

import pytest

from serve.worker import rank_loop
from serve.worker.vitals import PULSE, Vitals, furthest_behind, stalled

LIMIT = 10.0
NOW = 100.0


@pytest.fixture
def ranks() -> Iterator[list[Vitals]]:
    """Two ranks that were well a moment ago."""
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
    yield [Vitals(number, 0, ours, NOW) for number, (ours, _) in enumerate(pairs)]
    for pair in pairs:
        for end in pair:
            end.close()


def test_a_rank_that_waits_is_excused_while_another_works(ranks: list[Vitals]) -> None:
    ranks[1].waiting, ranks[1].worked = True, NOW - 500.0
    assert stalled(ranks, NOW, LIMIT) is None


def test_of_two_silent_ranks_the_one_that_does_not_wait_is_named(ranks: list[Vitals]) -> None:
    ranks[0].waiting = True
    ranks[0].worked = ranks[1].worked = NOW - 11.0
    assert stalled(ranks, NOW, LIMIT) == (
        "rank 1 hangs while the model is loaded: for 11.0 s it has neither read nor computed anything"
    )


def test_a_rank_that_waits_must_let_its_heart_be_heard(ranks: list[Vitals]) -> None:
    ranks[0].waiting, ranks[0].heard = True, NOW - 12.0
    said = stalled(ranks, NOW, LIMIT)
    assert said is not None
    assert said.startswith("rank 0 is frozen while the model is loaded: for 12.0 s")


def test_ranks_that_all_wait_for_one_another_hang(ranks: list[Vitals]) -> None:
    for rank in ranks:
        rank.waiting, rank.worked = True, NOW - 11.0
    assert "hangs" in str(stalled(ranks, NOW, LIMIT))
    assert stalled([], NOW, LIMIT) is None


def test_the_rank_that_has_done_least_is_the_one_that_the_others_wait_for() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.setblocking(False)
        ahead, behind = Vitals(0, 0, ours, NOW), Vitals(1, 0, ours, NOW)
        for count in (7, 8):
            theirs.send(PULSE.pack(True, count, 0))
        ahead.listen(NOW + 1.0)
        assert (ahead.count, ahead.waiting, ahead.heard) == (8, True, NOW + 1.0)
        assert furthest_behind([ahead, behind]) == 1
        assert furthest_behind([behind]) == 1
        behind.count = 8
        assert furthest_behind([ahead, behind]) is None, "equal counts tell nothing"


def test_of_a_rank_whose_work_cannot_be_seen_nothing_is_said(ranks: list[Vitals]) -> None:
    for second in range(20):  # the process of number 0, of which the system tells nothing
        for rank in ranks:
            rank.look(NOW + second)
    assert stalled(ranks, NOW + 20, LIMIT) is None


def test_the_heart_of_a_rank_that_imports_torch_at_this_moment_beats_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module is there from the beginning of its import, and what it has comes later."""
    half = types.ModuleType("torch")
    monkeypatch.setitem(sys.modules, "torch", half)
    assert rank_loop._device_bytes() == 0
    half.cuda = types.ModuleType("torch.cuda")  # type: ignore[attr-defined]  # torch has it
    assert rank_loop._device_bytes() == 0
