"""What a run has in common whoever starts its ranks: its folders, what it says, and how a rank ends."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.markup import escape

from finetune.config import TuneConfig
from finetune.errors import FinetuneError
from finetune.launch.prerequisites import settled
from finetune.machine.swap import claimed_swap
from finetune.output.folder import claimed_output

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedRun:
    """A run whose folders are held by this process."""

    config: TuneConfig
    """Its configuration as all ranks are to have it."""
    output: Path
    swap: Path | None
    """Its own folder on the NVMe disk, if anything is offloaded there."""


@contextmanager
def claimed_run(config: TuneConfig, say: Say) -> Iterator[ClaimedRun]:
    """Hold the folders of a run while entered, with its settings written to ``config.yaml``.

    The swap files go once no rank is left that could use them.

    Raises:
        ConfigError: another process trains there, what lies there is no run, or the model is not what the run began with.
        OSError: the folder cannot be written.
    """
    with ExitStack() as stack:
        output = stack.enter_context(claimed_output(config))
        config = settled(config, say)
        swap = stack.enter_context(claimed_swap(config, say))
        text = yaml.safe_dump(plain(asdict(config)), sort_keys=False, allow_unicode=True)
        (output / "config.yaml").write_text(text, encoding="utf-8")
        yield ClaimedRun(config=config, output=output, swap=swap)


@contextmanager
def ending_with_it(report: Callable[[BaseException, int], None]) -> Iterator[None]:
    """End this process, a rank, at once when what is inside fails.

    Nothing is cleaned up that could wait for other ranks: threads of a torn process group may never end.

    Args:
        report: told the failure and the exit code, before the end.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, FinetuneError):
            traceback.print_exc()
        code = error.exit_code if isinstance(error, FinetuneError) else 1
        report(error, code)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def saying(console: Console) -> Say:
    """Writes what takes time, or what a name stands for, to ``console``."""
    return lambda text: console.print(f"[dim]{escape(text)}[/]", highlight=False, soft_wrap=True)


def silent(text: str) -> None:
    """In the place of ``saying`` where another rank writes."""


def plain(value: Any) -> Any:
    """Tuples as lists, for YAML and JSON."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, tuple | list) else value
