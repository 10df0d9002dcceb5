"""The folder of a run's swap files: one a run, kept while a process of the run lives, cleared away when none does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from finetune.config import DataConfig, ModelConfig, OffloadConfig, RunConfig, TokenizerConfig, TuneConfig
from finetune.errors import ConfigError
from finetune.machine.swap import claimed_swap, held_swap

HOLDER = """
import sys
from pathlib import Path
from finetune.machine.swap import held_swap

with held_swap(Path(sys.argv[1])) as folder:
    (folder / "zero_stage_3").mkdir(exist_ok=True)
    (folder / "zero_stage_3" / "0.tensor.swp").write_bytes(bytes(1 << 20))
    print("held", flush=True)
    sys.stdin.read()
"""


def config(path: Path, output: str = "out") -> TuneConfig:
    return TuneConfig(
        run=RunConfig(output=output),
        data=DataConfig(train=("text",)),
        model=ModelConfig(new={"model_type": "gpt_neox"}),
        tokenizer=TokenizerConfig(path="somewhere"),
        offload=OffloadConfig(path=str(path), optimizer="nvme"),
    )


def silent(text: str) -> None:
    raise AssertionError(f"nothing was to be said: {text}")


@contextmanager
def another_process(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds ``folder`` and has a file in it, until its standard input is closed."""
    command = [sys.executable, "-c", HOLDER, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def test_two_runs_with_one_path_have_a_folder_each_and_leave_none(tmp_path: Path) -> None:
    with claimed_swap(config(tmp_path), silent) as first, claimed_swap(config(tmp_path), silent) as second:
        assert first is not None
        assert second is not None, "also of the same run.output"
        assert first != second
        assert first.parent == second.parent == tmp_path
        (first / "zero_stage_3").mkdir()
        (first / "zero_stage_3" / "0.tensor.swp").write_bytes(b"swapped")
        (second / "0.tensor.swp").write_bytes(b"swapped")
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_fails_leaves_no_swap_files_either(tmp_path: Path) -> None:
    def run() -> None:
        with claimed_swap(config(tmp_path), silent) as folder:
            assert folder is not None
            (folder / "0.tensor.swp").write_bytes(b"swapped")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    assert list(tmp_path.iterdir()) == []


def test_files_of_a_living_run_stay_and_those_of_a_killed_one_go(tmp_path: Path) -> None:
    living, killed = (tmp_path / f"tessera-run-{digit * 32}" for digit in "ab")
    told: list[str] = []
    with another_process(living), another_process(killed) as victim:
        with claimed_swap(config(tmp_path), silent):
            assert (killed / "zero_stage_3" / "0.tensor.swp").is_file(), "it lives"
        victim.send_signal(signal.SIGKILL)
        victim.wait()
        assert (killed / "zero_stage_3" / "0.tensor.swp").is_file(), "a killed process cannot clear away"
        with claimed_swap(config(tmp_path), told.append):
            assert not killed.exists()
            assert (living / "zero_stage_3" / "0.tensor.swp").is_file()
    assert told == [f"removed 1 MiB of swap files in {killed}, left by a run that was killed"]


def test_the_last_process_of_a_run_removes_its_files(tmp_path: Path) -> None:
    with claimed_swap(config(tmp_path), silent) as folder:
        assert folder is not None
        with another_process(folder) as rank:
            with held_swap(folder):
                pass
            assert (folder / "zero_stage_3").is_dir(), "this process lets go before others"
            rank.communicate()
            assert (folder / "zero_stage_3").is_dir(), "the first one holds it still"
    assert not folder.exists()


def test_a_folder_of_the_same_name_on_a_node_of_its_own_is_made_there(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "yet" / "there"
    with held_swap(folder):
        assert folder.is_dir()
    assert not folder.exists()


def test_a_folder_left_before_it_was_locked_goes_and_what_is_not_ours_stays(tmp_path: Path) -> None:
    (tmp_path / f"tessera-run-{'c' * 32}").mkdir()
    others = [tmp_path / "zero_stage_3", tmp_path / "tessera-run-mine", tmp_path / "elsewhere"]
    for other in others:
        other.mkdir()
    os.symlink(others[2], tmp_path / f"tessera-run-{'d' * 32}")
    with claimed_swap(config(tmp_path), lambda _: None):
        pass
    assert sorted(tmp_path.iterdir()) == sorted([*others, tmp_path / f"tessera-run-{'d' * 32}"])


def test_nothing_is_made_when_nothing_goes_to_the_disk(tmp_path: Path) -> None:
    plain = TuneConfig(
        run=RunConfig(output="out"),
        data=DataConfig(train=("text",)),
        model=ModelConfig(new={"model_type": "gpt_neox"}),
        tokenizer=TokenizerConfig(path="somewhere"),
    )
    with claimed_swap(plain, silent) as folder:
        assert folder is None


@pytest.mark.parametrize("path", ["file", "file/below", "/proc/nowhere", "/proc"])
def test_a_path_that_cannot_hold_files_is_refused_by_its_key(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ConfigError, match=r"offload\.path: .* cannot be written: "),
        claimed_swap(config(tmp_path / path), silent),
    ):
        pass


def test_a_disk_without_locks_is_refused_by_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", none)
    with pytest.raises(ConfigError, match=r"offload\.path: .* cannot be locked: Function not implemented"):
        claimed_swap(config(tmp_path), silent).__enter__()
