"""``python -m tests.finetune.forked_ranks RANKS LOGS MODULE WORDS ...``: import once what all ranks need, then fork them.

Importing takes a rank longer than most of what it is tested for. Nothing is computed before the fork, so that no pool of
threads is lost in it.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any


def main(ranks: int, logs: Path, module: str, words: list[str]) -> int:
    """Be the parent of all ranks; 0 if all of them ended with 0."""
    importlib.import_module(module)
    assert len(os.listdir("/proc/self/task")) == 1, "a thread would be lost in the fork"
    children = [_start(rank, logs / f"rank-{rank}.log", module, words) for rank in range(ranks)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    print(codes, flush=True)
    return int(any(codes))


def _start(rank: int, log: Path, module: str, words: list[str]) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(target, 1)
        os.dup2(target, 2)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        _share_one_device()
        sys.argv = [module, *words]
        warnings.filterwarnings("ignore", message=".*found in sys.modules after import", category=RuntimeWarning)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _share_one_device() -> None:
    """Let all groups of a rank have the same connections' thread.

    Of gloo each has one of its own, which wakes a hundred times a second. A run has a dozen groups; what is tested here makes
    dozens of engines in one process, and these threads would take a quarter of its time.
    """
    from torch.distributed import ProcessGroupGloo

    make, device = ProcessGroupGloo.__init__, ProcessGroupGloo.create_default_device()

    def shared(self: Any, store: Any, rank: int, size: int, timeout: Any) -> None:
        options = ProcessGroupGloo._Options()
        options._devices, options._timeout = [device], timeout
        make(self, store, rank, size, options)

    ProcessGroupGloo.__init__ = shared


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4:]))
