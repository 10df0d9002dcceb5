"""Processes that are forked from one that has imported what they need."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from host.forked import ForkedProcess, ForkServer, ForkServerLost


def said(words: Sequence[str]) -> int:
    """Called in the new process: what the tests below look at."""
    task, *rest = words
    if task == "exit":
        return int(rest[0])
    if task == "leave":
        sys.exit(rest[0])
    if task == "break":
        raise LookupError("broken")
    if task == "wait":
        signal.pause()
    with open(3, "w") as answer:
        print(
            os.getpid(), os.getppid(), os.getsid(0), sorted(os.environ), sys.argv, "fractions" in sys.modules,
            json.dumps([name for name in os.listdir("/proc/self/fd") if int(name) > 3]), signal.getsignal(signal.SIGTERM).name,
            file=answer, sep="|",
        )  # fmt: skip
    return 0


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with contextlib.closing(ForkServer(["fractions", __name__], os.environ)) as server:
        yield server


def spawn(server: ForkServer, *words: str, more: Sequence[int] = (), err: int = 2, new_session: bool = False) -> ForkedProcess:
    with open(os.devnull, "rb") as nothing:
        return server.spawn(
            f"{__name__}:said", words, environment={"WHO": "me"}, descriptors=(nothing.fileno(), 2, err, *more),
            new_session=new_session,
        )  # fmt: skip


@pytest.mark.parametrize("new_session", [False, True])
def test_a_forked_process_is_our_child_with_what_it_was_given_and_nothing_else(server: ForkServer, new_session: bool) -> None:
    read, write = os.pipe()
    process = spawn(server, "tell", "all", more=(write,), new_session=new_session)
    os.close(write)
    with open(read) as answer:
        pid, parent, session, environment, argv, imported, others, term = answer.read().strip().split("|")
    assert process.wait(120.0) == 0
    assert (int(pid), int(parent)) == (process.pid, os.getpid())
    assert (int(session) == process.pid) == new_session
    assert (environment, imported, term) == ("['WHO']", "True", "SIG_DFL")
    assert argv == f"['{__name__}', 'tell', 'all']"
    assert len(json.loads(others)) <= 1, "the list itself"


def test_ends_are_told_as_those_of_programs(server: ForkServer, tmp_path: Path) -> None:
    assert spawn(server, "exit", "7").wait(120.0) == 7
    with (tmp_path / "said").open("wb") as err:
        assert spawn(server, "leave", "because", err=err.fileno()).wait(120.0) == 1
        assert spawn(server, "break", err=err.fileno()).wait(120.0) == 1
    text = (tmp_path / "said").read_text()
    assert text.startswith("because\n")
    assert "LookupError: broken" in text
    process = spawn(server, "wait")
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.kill()
    assert process.wait(120.0) == -signal.SIGKILL
    process.send_signal(signal.SIGTERM)  # to nobody


def test_what_was_forked_lives_on_without_it_and_the_next_is_refused() -> None:
    server = ForkServer([__name__], os.environ)
    process = spawn(server, "wait")
    os.kill(server.pid, signal.SIGKILL)
    with pytest.raises(ForkServerLost, match="signal SIGKILL"):
        spawn(server, "wait")
    assert process.poll() is None
    process.kill()
    assert process.wait(120.0) == -signal.SIGKILL
    server.close()


def test_what_a_process_was_handed_is_closed_with_it_however_slow_the_one_it_was_forked_from() -> None:
    with contextlib.closing(ForkServer([__name__, "tests.host.slow_parent"], os.environ)) as server:
        read, write = os.pipe()
        process = spawn(server, "wait", more=(write,))
        os.close(write)
        process.kill()
        assert process.wait(120.0) == -signal.SIGKILL
        with open(read, "rb") as pipe:
            assert select.select([pipe], [], [], 0.0)[0], "nobody else has the other end"


def test_a_module_that_is_not_there_is_told_and_ends_it(capfd: pytest.CaptureFixture[str]) -> None:
    server = ForkServer(["there_is_no_such_module"], os.environ)
    with pytest.raises(ForkServerLost, match="exit code 1"):
        spawn(server, "wait")
    assert "No module named 'there_is_no_such_module'" in capfd.readouterr().err
    server.close()


def test_one_that_does_not_answer_is_waited_for_no_longer_than_is_wanted() -> None:
    server = ForkServer([__name__], os.environ)
    spawn(server, "exit", "0").wait(120.0)
    os.kill(server.pid, signal.SIGSTOP)
    asked = []

    def unless() -> None:
        asked.append(time.monotonic())
        if len(asked) == 2:
            raise TimeoutError("no longer")

    with pytest.raises(TimeoutError, match="no longer"):
        server.spawn(f"{__name__}:said", ["exit", "0"], environment={}, descriptors=(2, 2, 2), unless=unless)
    with pytest.raises(ForkServerLost):
        spawn(server, "exit", "0")


def test_that_no_process_can_be_had_is_told_and_the_next_is_tried() -> None:
    server = ForkServer([__name__], os.environ)
    spawn(server, "exit", "0").wait(120.0)
    soft, hard = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (64, hard))  # what it is handed has no place above
    with pytest.raises(BlockingIOError, match="no process could be forked"):
        spawn(server, "exit", "0")
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (soft, hard))
    assert spawn(server, "exit", "3").wait(120.0) == 3
    server.close()


def test_orders_from_several_threads_are_each_answered(server: ForkServer) -> None:
    codes: dict[int, int] = {}

    def order(code: int) -> None:
        codes[code] = spawn(server, "exit", str(code)).wait(120.0)

    threads = [threading.Thread(target=order, args=(code,)) for code in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == {code: code for code in range(12)}


_ITSELF = """
import sys
import tests.host.test_forked as t
from host.forked import ForkServer
server = ForkServer(["tests.host.test_forked"], {})
print(open(f"/proc/{server.pid}/cmdline").read() == open("/proc/self/cmdline").read(), t.spawn(server, "exit", "5").wait(120.0))
server.close()
"""


def test_a_process_of_one_thread_that_has_imported_all_of_it_forks_itself() -> None:
    done = subprocess.run([sys.executable, "-c", _ITSELF], capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.stderr) == ("True 5\n", "")


def test_nothing_is_left_when_the_process_that_asked_is_killed() -> None:
    program = (
        "import os, sys, signal, tests.host.test_forked as t; from host.forked import ForkServer;"
        "server = ForkServer(['fractions'], os.environ); t.spawn(server, 'exit', '0').wait(120.0);"
        "print(server.pid, flush=True); signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        watch = os.pidfd_open(pid)
        process.kill()
    assert select.select([watch], [], [], 120.0)[0], "it has ended"
    os.close(watch)
