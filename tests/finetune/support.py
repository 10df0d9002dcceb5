"""What the tests of training share: small text, small configurations, the command as a process."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune.machine import inventory
from finetune.machine.process import rank_environment
from tests.support import warm

NEEDS_LIBAIO = pytest.mark.skipif(inventory.libaio() is None, reason="libaio is missing: apt-get install libaio-dev")
COMMAND = (sys.executable, "-m", "finetune")
ROOT = Path(__file__).parents[2]


def write_text_folder(folder: Path, *, files: int = 6, lines: int = 60) -> Path:
    """Files of made-up Python with some regularity to learn; the same on every machine."""
    draw = random.Random(7)
    names = ["path", "value", "count", "items", "total", "name"]
    folder.mkdir(parents=True)
    for number in range(files):
        rows = []
        for _ in range(lines):
            a, b = draw.choice(names), draw.choice(names)
            rows.append(
                draw.choice([f"def get_{a}({b}):", f"    return self.{a}.{b}", f"    {a} = {b} + {draw.randrange(9)}", ""])
            )
        (folder / f"module_{number}.py").write_text("\n".join(rows), encoding="utf-8")
    return folder


def small_run(text: Path, output: Path, **sections: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration that trains in about a second; ``sections`` are laid over it."""
    model = {"model_type": "gpt_neox", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    tree: dict[str, Any] = {
        "model": {"new": {**model, "intermediate_size": 64, "hidden_dropout": 0.1}},
        "tokenizer": {"train": {"vocab_size": 300}},
        "data": {"train": str(text), "pattern": "*.py", "seq_len": 32, "eval_fraction": 0.1},
        "batch": {"micro": 2, "accumulation": 2},
        "schedule": {"steps": 12, "warmup": 2},
        "optimizer": {"lr": 5e-3},
        "eval": {"every": 6, "samples": 5},
        "save": {"every": 6},
        "log": {"every": 1},
        "run": {"output": str(output), "device": "cpu"},
    }
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    return tree


def write_config(tree: Mapping[str, Any], path: Path) -> Path:
    path.write_text(yaml.safe_dump(dict(tree)), encoding="utf-8")
    return path


def run_command(
    *words: str | Path, env: Mapping[str, str] | None = None, seconds: float = 600
) -> subprocess.CompletedProcess[str]:
    """Run ``tessera-finetune`` to its end; see ``tests.support.warm``."""
    if env is None and warm.can_fork(os.environ):
        program = fork_command(words)
        try:
            out, err = program.communicate(seconds)
        except subprocess.TimeoutExpired:
            program.kill()
            raise
        return subprocess.CompletedProcess(list(map(str, words)), program.wait(), out, err)
    return subprocess.run(
        [*COMMAND, *map(str, words)],
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def fork_command(words: Sequence[str | Path]) -> warm.Program:
    """``tessera-finetune`` while it runs, forked from what has imported it; ``start_command`` starts one as a user does."""
    return warm.start("finetune", [str(word) for word in words])


def run_ranks(module: str, ranks: int, out: Path, *words: str | Path, seconds: float = 600) -> None:
    """Run ``python -m MODULE OUT WORDS`` as each rank of a run on the CPU; all must succeed. Their logs go to ``out``."""
    environment = {**os.environ, **rank_environment(ranks, 1), "DS_ACCELERATOR": "cpu"}
    given = [str(ranks), str(out), module, str(out), *map(str, words)]
    parent = warm.start("tests.finetune.forked_ranks", given, environment, new_session=True)
    try:
        said, more = parent.communicate(timeout=seconds)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)  # the ranks are in its session
        parent.wait()
    logs = (out / f"rank-{rank}.log" for rank in range(ranks))
    logged = [log.read_text()[-3000:] for log in logs if log.exists()]
    assert parent.returncode == 0, "\n".join([said[-3000:], more[-3000:], *logged])


_WITNESS = """
import atexit, os, sys

class Witness:
    def __del__(self, make=os.mkdir, path={folder!r} + f"/taken-down-{{os.getpid()}}"):
        make(path)

if any("finetune" in word for word in sys.orig_argv):
    witness = Witness()
    atexit.register(os.mkdir, {folder!r} + f"/ended-{{os.getpid()}}")
"""


def witness_environment(folder: Path) -> tuple[dict[str, str], Callable[[], list[str]]]:
    """An environment that has processes tell how they end, and what lists it: ``ended``, and ``taken-down`` where the
    interpreter was taken down too."""
    seen = folder / "witness"
    seen.mkdir()
    (seen / "sitecustomize.py").write_text(_WITNESS.format(folder=str(seen)))
    search = os.pathsep.join([str(seen), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": search}, lambda: sorted(
        path.name.rpartition("-")[0] for path in seen.iterdir() if path.is_dir() and "-" in path.name
    )


@contextlib.contextmanager
def start_command(words: Sequence[str | Path]) -> Iterator[subprocess.Popen[str]]:
    """``tessera-finetune``, started as a user does; what still runs at the end is killed: a run may go on for ever."""
    with subprocess.Popen(
        [*COMMAND, *map(str, words)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()
