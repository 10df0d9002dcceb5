"""How ranks are started, told, watched and ended, with shell scripts in their place: none is left, and the cause is told."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from finetune.errors import FinetuneError, RankDied, RunError
from finetune.launch import local
from finetune.launch.instructions import Refused, decoded, encoded
from finetune.launch.local import RankProcesses
from tests.finetune.launch.test_instructions import TOLD

REPORT = """report() { printf '%s' "$1" > "$(dirname "$0")/logs/rank-$RANK.error.json"; }
"""
"""What a rank leaves behind; ``$0`` is the file of the run that it was given."""
HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class SilentFile:
    """A run's file without a configuration, which the scripts do not read."""

    def write(self, path: Path) -> None:
        path.write_text("{}")


Started = Callable[..., Any]


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Started:
    """Starts ``script`` as every rank of a run; the first line it reads is what ranks are told."""

    @contextmanager
    def start(script: str, ranks: int = 2, grace: float = 0.0) -> Iterator[RankProcesses]:
        monkeypatch.setattr(local, "module_command", lambda _: ["/bin/sh", "-c", REPORT + script])
        monkeypatch.setattr(local, "_GRACE_SECONDS", grace)
        file: Any = SilentFile()
        with RankProcesses(tmp_path, file, ranks=ranks, threads=3) as processes:
            yield processes

    return start


def ended(process: int) -> bool:
    """Whether a process of ours is gone and was waited for."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    return False


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.005)


def test_every_rank_is_told_who_it_is_and_what_to_do(started: Started, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-7.log").write_text("of a run before")
    script = 'read line; echo "$RANK $LOCAL_RANK $WORLD_SIZE $OMP_NUM_THREADS $TESSERA_PARENT"; echo "$line"'
    with started(script) as processes:
        assert len(set(processes.process_ids)) == 2
        processes.go(TOLD)
        processes.wait()
        processes.check()
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["rank-0.log", "rank-1.log"]
    for rank in range(2):
        first, second = (tmp_path / "logs" / f"rank-{rank}.log").read_bytes().splitlines()
        assert first == f"{rank} {rank} 2 3 {os.getpid()}".encode()
        assert decoded(second) == TOLD
    assert all(map(ended, processes.process_ids))


def test_what_a_line_says_is_whole_whatever_it_holds() -> None:
    told = Refused(message="ä\n\"'", exit_code=1)
    assert decoded(encoded(told) + b"\n") == told


def error(message: str, *, expected: bool, at: float, code: int = 1) -> str:
    return json.dumps({"message": message, "expected": expected, "time": at, "exit_code": code})


CAUSES: dict[str, tuple[str, str, int, bool]] = {
    # script, what is said, exit code, whether a rank told it by a rule
    "no word": ("[ $RANK = 0 ] || exit 3", "rank 1 ended with code 3: it said nothing; its log: {log1}", 1, False),
    "last words": (
        "[ $RANK = 1 ] || { printf 'a\\nb\\nc\\nd\\n'; exit 9; }",
        "rank 0 ended with code 9: b / c / d; its log: {log0}",
        1,
        False,
    ),
    "a rule of ours before the echo": (
        f"[ $RANK = 0 ] && report '{error('peer is gone', expected=False, at=1.0)}' ||"
        f" report '{error('data.train: broken', expected=True, at=5.0, code=2)}'; exit 1",
        "data.train: broken",
        2,
        True,
    ),
    "the first of two echoes": (
        f"[ $RANK = 0 ] && report '{error('later', expected=False, at=7.0)}' ||"
        f" report '{error('sooner', expected=False, at=3.0)}'; exit 1",
        "rank 1: sooner; its log: {log1}",
        1,
        False,
    ),
    "a signal before an error": (
        f"[ $RANK = 0 ] && {{ report '{error('peer is gone', expected=False, at=1.0)}'; exit 1; }}; echo last; kill -ABRT $$",
        "rank 1 was ended by SIGABRT: last; its log: {log1}",
        1,
        False,
    ),
    "killed": (
        "[ $RANK = 0 ] || kill -KILL $$",
        "rank 1 was killed (SIGKILL): by hand, or by the system because memory ran out (see dmesg; tessera-finetune doctor); "
        "its log: {log1}",
        1,
        False,
    ),
    "a report cut short": (
        'report \'{"message": "x\'; exit 4',
        "ended with code 4: it said nothing; its log: ",
        1,
        False,
    ),
}


@pytest.mark.parametrize("case", CAUSES)
def test_the_first_thing_that_went_wrong_is_the_cause(
    started: Started, tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "killed_for_memory", lambda _: None)
    script, said, code, told = CAUSES[case]
    with started(script, grace=60.0) as processes:
        processes.go(TOLD)
        with pytest.raises(RankDied) as died:
            processes.wait()
    logs = {f"log{rank}": tmp_path / "logs" / f"rank-{rank}.log" for rank in range(2)}
    assert said.format(**logs) in str(died.value) if case == "a report cut short" else str(died.value) == said.format(**logs)
    assert (died.value.exit_code, died.value.told) == (code, told)


def test_a_kill_for_want_of_memory_is_told_as_one(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(local, "memory_kills", lambda: 41)
    monkeypatch.setattr(local, "killed_for_memory", lambda before: seen.append(before) or "killed for memory")
    with (
        started("kill -KILL $$", ranks=1) as processes,
        pytest.raises(RankDied, match=r"^rank 0 was killed for memory; its log"),
    ):
        processes.wait()
    assert seen == [41], "the kernel's own count, from before the ranks began"


def test_ranks_that_wait_for_one_that_is_gone_are_ended_too(started: Started) -> None:
    with started("[ $RANK = 1 ] && exit 5; exec sleep 600", ranks=3) as processes:
        processes.go(TOLD)
        with pytest.raises(RankDied, match="rank 1 ended with code 5"):
            processes.wait()
    assert all(map(ended, processes.process_ids))


def test_leaving_ends_whatever_still_runs_and_gives_signals_back(started: Started) -> None:
    before = [signal.getsignal(number) for number in HANDLED]

    def fails() -> None:
        with started("exec sleep 600") as processes:
            ids.extend(processes.process_ids)
            assert [signal.getsignal(number) for number in HANDLED] != before
            raise KeyError("data")

    ids: list[int] = []
    with pytest.raises(KeyError):
        fails()
    assert len(ids) == 2
    assert all(map(ended, ids))
    assert [signal.getsignal(number) for number in HANDLED] == before


def test_where_a_rank_cannot_be_started_those_before_it_end_and_signals_are_given_back(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [signal.getsignal(number) for number in HANDLED]
    really, ids = local.subprocess.Popen, list[int]()

    def second_fails(*words: Any, **options: Any) -> Any:
        if ids:
            raise OSError("no room for a process")
        process = really(*words, **options)
        ids.append(process.pid)
        return process

    monkeypatch.setattr(local.subprocess, "Popen", second_fails)
    with pytest.raises(OSError, match="no room"), started("exec sleep 600"):
        raise AssertionError("never entered")
    assert ended(ids[0])
    assert [signal.getsignal(number) for number in HANDLED] == before


def test_a_rank_that_ends_while_the_data_is_prepared_ends_the_preparation(started: Started, tmp_path: Path) -> None:
    waits = 'until [ -e "$(dirname "$0")/now" ]; do sleep 0.01; done; [ $RANK = 1 ] && read line; exit 6'
    with started(waits) as processes:
        processes.check()
        (tmp_path / "now").touch()

        def check() -> bool:
            processes.check()
            return False

        with pytest.raises(FinetuneError, match="rank 0 ended with code 6"):
            until(check)
    with started("exit 7", ranks=1) as processes:
        until(lambda: processes._processes[0].poll() is not None)
        processes.go(TOLD)
        with pytest.raises(RankDied, match="rank 0 ended with code 7"):
            processes.wait()


def test_a_stop_before_training_is_at_once_and_one_during_it_is_passed_on(started: Started, tmp_path: Path) -> None:
    with started("exec sleep 600") as processes:
        signal.raise_signal(signal.SIGTERM)
        assert processes.interrupted is signal.SIGTERM
        for act in (processes.check, lambda: processes.go(TOLD), processes.wait):
            with pytest.raises(RunError, match=r"^stopped by SIGTERM before training began$"):
                act()
    trapped = "trap 'echo saved; exit 0' TERM; read line; echo ready; while :; do sleep 0.01; done"
    with started(trapped) as processes:
        processes.go(TOLD)
        until(lambda: all(b"ready" in (tmp_path / "logs" / f"rank-{rank}.log").read_bytes() for rank in range(2)))
        signal.raise_signal(signal.SIGINT)
        processes.wait()
        assert processes.interrupted is signal.SIGINT
    assert all(b"saved" in (tmp_path / "logs" / f"rank-{rank}.log").read_bytes() for rank in range(2))


def test_a_second_stop_does_not_wait_for_the_save(started: Started, tmp_path: Path) -> None:
    stubborn = "trap '' TERM; read line; echo ready; while :; do sleep 0.01; done"
    with started(stubborn) as processes:
        processes.go(TOLD)
        until(lambda: all(b"ready" in (tmp_path / "logs" / f"rank-{rank}.log").read_bytes() for rank in range(2)))
        signal.raise_signal(signal.SIGTERM)
        assert not any(map(ended, processes.process_ids))
        signal.raise_signal(signal.SIGHUP)
        with pytest.raises(RunError, match=r"^stopped at once, without a save; --resume goes on from the last one$"):
            processes.wait()
