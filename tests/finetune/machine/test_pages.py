"""Pages that large tensors have one after the other, tried in processes of their own: there is no way back from them."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from finetune.launch.instructions import Instructions
from finetune.launch.rank import train_rank
from finetune.machine import build_ops, ops, pages
from finetune.train import begin
from host.modules import import_path
from tests.finetune.forecast.support import config_of

BEGIN = """
import ctypes, json, random, resource, sys, threading
from pathlib import Path
import torch
from finetune.machine import pages

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

def mappings():
    return len(Path("/proc/self/maps").read_text().splitlines())

KIB, MIB = 1 << 10, 1 << 20
early = torch.full((MIB,), 3.0)
before = resident()
pages.use(Path(sys.argv[1]), **json.loads(sys.argv[2]))
say = lambda **told: print(json.dumps(told))
"""


def ran(library: Path, program: str, *, environment: dict[str, str] | None = None, **options: int) -> dict[str, Any]:
    """What a program said that used the library."""
    words = [sys.executable, "-c", BEGIN + program, str(library), json.dumps(options)]
    own = {**os.environ, "PYTHONPATH": import_path(os.environ), "OMP_NUM_THREADS": "1", **(environment or {})}
    done = subprocess.run(words, env=own, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert isinstance(answer, dict)
    return answer


@pytest.fixture(scope="module")
def library() -> Path:
    if not pages.supported():
        pytest.skip("pages are moved by Linux alone")
    built = ops.ensure(ops.PAGES, lambda _: None)
    if not built.available:
        pytest.skip(built.reason)
    return ops.library_of(ops.PAGES)


def test_nobody_keeps_pages_unless_told() -> None:
    assert pages.figures() is None
    pages.give_back()  # nothing to do


def test_a_tensor_has_the_pages_of_those_before_it_wherever_they_lie(library: Path) -> None:
    said = ran(
        library,
        """
three = [torch.full((MIB,), float(number)) for number in range(3)]   # 4 MiB each
first = pages.figures()
del three[1]
small = torch.full((1000,), 1.0)
one = torch.full((MIB - 1000,), 7.0)   # in the gap
del three[0], one
two = torch.full((2 * MIB,), 8.0)      # longer than each gap
last = pages.figures()
right = bool((two == 8).all() and (three[0] == 2).all() and (small == 1).all() and (early == 3).all())
say(first=[first.live, first.held, first.fresh], last=[last.live, last.held, last.fresh], moved=last.moved, right=right)
""",
    )
    mib = 1 << 20
    assert said["right"], "what tensors hold is untouched by what others are given"
    assert said["first"] == [12 * mib] * 3
    assert said["last"] == [12 * mib, 12 * mib, 12 * mib], "not a page more than three tensors once took"
    assert 4 * mib <= said["moved"] <= 8 * mib


@pytest.mark.parametrize("large_pages", ["0", "1"])
def test_a_process_holds_what_its_tensors_once_took_together_and_no_more(library: Path, large_pages: str) -> None:
    said = ran(
        library,
        """
draw, live, most = random.Random(5), [], 0
for turn in range(4000):
    if live and (draw.random() < 0.5 or sum(tensor.numel() for tensor, _ in live) > 12 * MIB):
        tensor, value = live.pop(draw.randrange(len(live)))
        assert bool((tensor.numpy() == value).all()), turn   # with no tensor in between
        del tensor
    else:
        value = float(turn)
        live.append((torch.full((int(2 ** draw.uniform(15, 20.5)),), value), value))
    now = pages.figures()
    most = max(most, now.live)
    assert now.held == most, turn
full = resident() - before
live.clear()
tensor = None
pages.give_back()
rest = pages.figures()
say(most=most, full=full, empty=resident() - before, moved=rest.moved, fresh=rest.fresh, rest=[rest.live, rest.held])
""",
        environment={"THP_MEM_ALLOC_ENABLE": large_pages},
        smallest=1 << 17,
    )
    assert said["moved"] > 10 * said["most"], "nearly everything was made of pages of others"
    assert said["fresh"] == said["most"]
    assert abs(said["full"] - said["most"]) < 8 << 20, "as the kernel counts it too"
    assert said["rest"] == [0, 0]
    assert said["empty"] < 8 << 20


def test_threads_take_and_give_side_by_side(library: Path) -> None:
    said = ran(
        library,
        """
wrong, kept, lock = [], [], threading.Lock()
def work(number):
    draw = random.Random(number)
    for turn in range(300):
        value = float(1000 * number + turn)
        tensor = torch.full((draw.randrange(64, 512) * KIB,), value)
        with lock:
            kept.append((tensor, value))
            tensor, value = kept.pop(draw.randrange(len(kept)))   # another thread's, as often as not
        if not bool((tensor == value).all()):
            wrong.append(value)
threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
kept.clear()
now = pages.figures()
say(wrong=wrong, live=now.live, held=now.held)
""",
    )
    assert said["wrong"] == []
    assert said["live"] == 0
    assert 0 < said["held"] < 64 << 20


def test_pages_are_in_no_more_pieces_than_the_kernel_can_count(library: Path) -> None:
    said = ran(
        library,
        """
began, pieces, wrong = mappings(), [], 0
for size in (1, 3, 7, 15, 31, 63, 127):   # each is made of all that were freed before it, in more and more pieces
    pieces = [torch.full((size * 64 * KIB,), float(number)) for number in range(256 // size + 1)]
    wrong += sum(not bool((piece == number).all()) for number, piece in enumerate(pieces))
    del pieces[::2]
now = pages.figures()
say(wrong=wrong, more=mappings() - began, live=now.live, held=now.held)
""",
        most_mappings=40,
    )
    assert said["wrong"] == 0
    assert said["more"] < 40 + 2 * 257, "and one for each of the tensors that there are at most"
    assert said["held"] >= said["live"] > 0


def test_a_tensor_that_finds_no_place_is_refused_in_torch_s_words(library: Path) -> None:
    said = ran(
        library,
        """
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 256 * MIB, resource.RLIM_INFINITY))
try:
    torch.empty(128 * MIB)
    reason = ""
except RuntimeError as error:
    reason = str(error)
fits = torch.full((MIB,), 2.0)
say(reason=reason, fits=bool((fits == 2).all()))
""",
    )
    assert "can't allocate memory" in said["reason"]
    assert said["fits"], "and what is smaller goes on"


@pytest.mark.parametrize(("device", "used"), [("cpu", True), ("cuda", False)])
def test_ranks_that_compute_on_the_cpu_use_what_was_built(monkeypatch: pytest.MonkeyPatch, device: str, used: bool) -> None:
    did: list[str] = []
    monkeypatch.setattr(pages, "use", lambda library: did.append(f"pages {library}"))
    monkeypatch.setattr(build_ops, "load_op", lambda name, library: did.append(f"{name} {library}"))
    monkeypatch.setattr(begin, "run_rank", lambda job, console, should_stop: did.append(f"trained, CPU Adam: {job.cpu_adam}"))
    prepared: Any = SimpleNamespace()
    libraries = {ops.CPU_ADAM: "/built/adam.so", ops.PAGES: "/built/pages.so"}
    told = Instructions(model_path=None, prepared=prepared, ops=libraries, disk=None, swap=None)
    config = config_of("x", run={"precision": "fp32"})
    train_rank(config, told, torch.device(device), lambda: False, Console(file=io.StringIO()), command="tune")
    assert did == ["cpu_adam /built/adam.so", *(["pages /built/pages.so"] if used else []), "trained, CPU Adam: True"]
