"""The demo's parts, without training or serving: what it gathers, shows, starts and stops."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from rich.console import Console

from examples.demo import corpus, screen, training
from examples.demo.__main__ import show_failure
from examples.demo.children import Child, Children, PartFailed, tail, wait_for_line
from tests.repo.documents import REPOSITORY
from tests.support import warm


@pytest.fixture(autouse=True)
def _no_other_children() -> Iterator[None]:
    """The demo ends whatever descends from it, and so would these tests what programs are forked from.

    They do end what watches over shared memory for multiprocessing, which would complain of that to a test after them.
    """
    warm.close()
    yield
    tracker = resource_tracker._resource_tracker  # type: ignore[attr-defined]  # nothing public says that it is gone
    if tracker._fd is not None and not tracker._check_alive():
        os.close(tracker._fd)
        tracker._fd = tracker._pid = None


def plain_console() -> Console:
    return Console(file=io.StringIO(), width=100, highlight=False)


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def make_library(root: Path) -> Path:
    """A small standard library: three modules worth reading, and what must be left out."""
    for name, text in {
        "config.py": "x = 1\n" * 60_000,
        "json/decoder.py": "y = 'é'\n" * 40_000,
        "queue.py": "z = 1\n" * 60_000,
        "tables.py": "t = 1\n" * 100_000,
        "site-packages/other.py": "z = 1\n",
        "test/test_json.py": "z = 1\n",
        "empty.py": "\n",
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (root / "latin.py").write_bytes(b"# \xe9\n" * 10)
    return root


def run(children: Children, name: str, program: str) -> Child:
    return children.start(name, [sys.executable, "-c", program])


def test_the_corpus_is_the_librarys_own_modules(tmp_path: Path) -> None:
    library = make_library(tmp_path / "lib")
    gathered = corpus.gather(tmp_path / "text", library)
    assert sorted(path.name for path in gathered.folder.iterdir()) == ["config.py", "json.decoder.py", "queue.py"]
    assert gathered.num_bytes == 3 * 360_000
    assert gathered.num_files == 3


def test_a_python_without_sources_is_named(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    with pytest.raises(corpus.NoSource, match="0 bytes of Python source"):
        corpus.gather(tmp_path / "text", tmp_path / "lib")


def test_the_loss_curve_falls_from_left_to_right() -> None:
    chart = screen.loss_curve([8.0 - 0.05 * step for step in range(100)], width=20, height=4).plain.splitlines()
    assert len(chart) == 4
    assert chart[0].startswith("  7.9")
    assert chart[0].count("█") < chart[-1].count("█")
    assert all(len(line) == 8 + 20 for line in chart)


def test_a_flat_loss_has_a_curve_too() -> None:
    assert "▁" in screen.loss_curve([2.0, 2.0], width=10, height=2).plain


def test_completions_stand_side_by_side_and_show_their_newest_lines() -> None:
    console = plain_console()
    panels = [
        screen.Completion("def a():\n", "\n".join(f"    line_{i}" for i in range(40)), 40, 0.25, True),
        screen.Completion("def b():\n", "    " + "x" * 60, 7),
    ]
    console.print(screen.completions(panels, 100, 6))
    lines = shown(console).splitlines()
    assert len(lines) == 8
    assert "def a():" in lines[0]
    assert "def b():" in lines[0]
    assert "line_39" in lines[6]
    assert "40 tokens · first after 250 ms" in lines[7]
    assert "▌" in shown(console)


def test_the_training_log_is_read_while_it_is_written(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    assert list(training.read_steps(log)) == []
    step = {"step": 1, "loss": 7.5, "tokens_per_second": 900.0}
    log.write_text(json.dumps(step) + "\n" + json.dumps({"note": "saved"}) + "\n" + '{"step": 2, "lo')
    assert list(training.read_steps(log)) == [step]


def test_what_takes_long_is_said_once_in_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "PLAIN_INTERVAL_SECONDS", 0.0)
    monkeypatch.setattr(training.time, "sleep", lambda seconds: None)
    polls = iter([None] * 5 + [0] * 9)
    child = SimpleNamespace(process=SimpleNamespace(poll=lambda: next(polls)), last_line=lambda: "building CPU Adam")
    console = plain_console()
    training._follow_plain(console, child, tmp_path / "log.jsonl", 0.0)  # type: ignore[arg-type]
    assert shown(console).count("preparing") == 5
    assert shown(console).count("building CPU Adam") == 1


def test_bf16_is_chosen_where_the_cpu_has_it(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    assert not training.has_bf16_arithmetic(cpuinfo)
    cpuinfo.write_text("flags\t: fpu avx2 avx512f\n")
    assert not training.has_bf16_arithmetic(cpuinfo)
    cpuinfo.write_text("flags\t: fpu avx2 avx512f avx512_bf16\n")
    assert training.has_bf16_arithmetic(cpuinfo)


def test_a_line_is_awaited_and_an_early_end_is_told(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        ready = run(children, "good", "print('tessera ready grpc=x')")
        broken = run(children, "bad", "import sys; sys.exit('no such model')")
        broken.process.wait()
        with pytest.raises(PartFailed, match="bad ended with exit code 1") as failed:
            wait_for_line(broken, "tessera ready ", 60)
        assert failed.value.log is not None
        assert "no such model" in "\n".join(tail(failed.value.log, 5))
        ready.process.wait()
        assert wait_for_line(ready, "tessera ready ", 60) == "tessera ready grpc=x"


def test_leaving_stops_children_and_their_orphans(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        sleeper = children.start("sleeper", [sys.executable, "-c", "import signal; print('up', flush=True); signal.pause()"])
        wait_for_line(sleeper, "up", 60)
        pids = [process.pid for process in psutil.Process().children(recursive=True)]
    assert sleeper.process.returncode == -signal.SIGTERM
    assert not [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux only")
def test_an_orphan_is_found(tmp_path: Path) -> None:
    program = (
        "import subprocess, sys;"
        "p = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()']);"
        "print('child', p.pid, flush=True)"
    )
    with Children(tmp_path) as children:
        parent = run(children, "parent", program)
        parent.process.wait()
        orphan = int(wait_for_line(parent, "child ", 60).split()[1])
        assert orphan in [process.pid for process in children.left_over(patience_seconds=0)]
    assert not psutil.pid_exists(orphan) or psutil.Process(orphan).status() == psutil.STATUS_ZOMBIE


def test_a_child_that_ignores_sigterm_is_killed_and_named(tmp_path: Path) -> None:
    deaf = (
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause(); signal.pause()"
    )
    with Children(tmp_path) as children:
        child = run(children, "deaf", deaf)
        wait_for_line(child, "up", 60)
        with pytest.raises(PartFailed, match="deaf did not stop within 0 s"):
            children.stop(child, 0.01)
        assert child.process.returncode == -signal.SIGKILL


def test_a_failure_shows_the_end_of_its_log(tmp_path: Path) -> None:
    log = tmp_path / "part.log"
    log.write_text("\n".join(f"line {i}" for i in range(100)))
    console = plain_console()
    show_failure(console, PartFailed("training ended with exit code 1", log))
    assert "The demo failed: training ended with exit code 1" in shown(console)
    assert "line 99" in shown(console)
    assert "line 79" not in shown(console)


def test_a_failing_part_ends_the_demo_with_1(tmp_path: Path) -> None:
    """Run from a folder without ``examples/demo.yaml``: training cannot start."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    result = subprocess.run(
        [sys.executable, "-m", "examples.demo", "--out", str(tmp_path / "out")],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert result.returncode == 1, result.stderr
    assert "The demo failed: training ended with exit code" in result.stdout
    assert "last lines of" in result.stdout
    assert "Traceback" not in result.stdout
