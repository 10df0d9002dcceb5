"""How processes of training end: whole, but with the interpreter left standing, where threads of Gloo may still want it."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from finetune.config.load import load_config
from finetune.launch.instructions import RunFile
from finetune.machine.process import rank_environment, without_collection
from tests.finetune.support import COMMAND, ROOT, run_command, small_run, witness_environment, write_config

PROGRAM = """
import atexit, sys, threading
from concurrent.futures import ThreadPoolExecutor
from host.process import end_process

class Witness:
    def __del__(self, say=sys.stdout.write):
        say("taken down\\n")

witness = Witness()
idle = ThreadPoolExecutor(1)
idle.submit(str).result()
atexit.register(print, "at exit")
go = threading.Event()
threading.Thread(target=lambda: (go.wait(), print("thread"))).start()
threading.Thread(target=threading.Event().wait, daemon=True).start()
threading.Timer(0, go.set).start()
{end}(3)
"""


@pytest.mark.parametrize(
    ("end", "last"), [("end_process", []), ("sys.exit", ["taken down"])], ids=["ours", "and what it would be without"]
)
def test_the_end_of_a_process_is_whole_and_leaves_the_interpreter(end: str, last: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(end=end)], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 3, done.stderr
    assert done.stdout.splitlines() == ["thread", "at exit", *last]


BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


def test_output_that_nobody_takes_does_not_change_the_code() -> None:
    program = "from host.process import end_process; print('lost'); end_process(0)"
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=BUFFERED, stdout=full, timeout=600, check=False)
    assert done.returncode == 0


def test_what_libraries_in_c_have_written_is_not_lost() -> None:
    program = "import ctypes; from host.process import end_process; ctypes.CDLL(None).printf(b'from C'); end_process(0)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=BUFFERED, capture_output=True, timeout=600, check=True)
    assert done.stdout == b"from C"


def test_a_rank_is_not_taken_down(tmp_path: Path) -> None:
    environment, seen = witness_environment(tmp_path)
    config = load_config(write_config(small_run(tmp_path, tmp_path / "run"), tmp_path / "run.yaml"))
    RunFile(config=config).write(tmp_path / "run.json")
    done = subprocess.run(
        [sys.executable, "-m", "finetune.launch.rank", str(tmp_path / "run.json")],
        cwd=ROOT,
        env={**environment, **rank_environment(1, 1), "RANK": "1", "LOCAL_RANK": "0", "TESSERA_PARENT": str(os.getpid())},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert seen() == ["ended"]


def test_a_command_is_not_taken_down(tmp_path: Path) -> None:
    environment, seen = witness_environment(tmp_path)
    assert run_command("--help", env=environment).returncode == 0
    assert seen() == ["ended"]


@pytest.mark.parametrize("words", [["--help"], ["export", "--help"]])
def test_output_that_cannot_be_written_is_an_error(words: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, *words], cwd=ROOT, env=BUFFERED, stdout=full, stderr=subprocess.PIPE, timeout=600, check=False
        )
    assert done.returncode == 1
    assert b"No space left" in done.stderr


@pytest.mark.parametrize("words", [["--help"], ["export", "--help"]])
def test_output_that_was_closed_is_no_error(words: list[str]) -> None:
    closed = ["sh", "-c", 'exec "$@" >&-', "sh", *COMMAND, *words]
    done = subprocess.run(closed, cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=600, check=False)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr


def test_what_comes_after_an_interruption_at_the_end_is_done() -> None:
    program = """
import atexit, sys, threading
from host.process import end_process
def interrupted():
    raise KeyboardInterrupt
threading._shutdown = interrupted
atexit.register(print, "at exit")
end_process(4)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stdout) == (4, "at exit\n")


def test_what_is_imported_without_collection_is_old_afterwards() -> None:
    with without_collection():
        assert not gc.isenabled()
        made = [[] for _ in range(5)]
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0, "it can be collected all the same"
    old = {id(one) for one in gc.get_objects(generation=2)}
    assert all(id(one) in old for one in made)


def test_ranks_get_large_tensors_in_large_pages_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)
    assert rank_environment(1, 1)["THP_MEM_ALLOC_ENABLE"] == "1"
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")
    assert rank_environment(1, 1)["THP_MEM_ALLOC_ENABLE"] == "0"


LARGE = """
import re, torch
tensor = torch.empty(16 << 20)
address = tensor.data_ptr()
for part in re.split(r"\\n(?=[0-9a-f]+-[0-9a-f]+ )", open("/proc/self/smaps").read()):
    begin, end = (int(number, 16) for number in part.split()[0].split("-"))
    if begin <= address < end:
        print("hg" in re.search(r"VmFlags:(.*)", part)[1].split())
"""


@pytest.mark.parametrize(("value", "asked"), [(None, "True"), ("0", "False")])
def test_torch_does_as_ranks_tell_it(value: str | None, asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists():
        pytest.skip("this kernel has no large pages to give")
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)
    if value is not None:
        monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", value)
    environment = {**os.environ, **rank_environment(1, 1)}
    done = subprocess.run(
        [sys.executable, "-c", LARGE], env=environment, capture_output=True, text=True, timeout=600, check=True
    )
    assert done.stdout.split() == [asked]
