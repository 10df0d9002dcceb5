"""``tessera-finetune``: train, prepare, evaluate, export. Exit codes: 0 done, 2 usage or bad configuration, 1 anything else."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from rich.console import Console
from rich.markup import escape

from finetune.commands.parser import COMMANDS
from finetune.errors import FinetuneError, RunError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    errors = Console(stderr=True)
    try:
        try:
            code = _run(words)
        except SystemExit as end:  # argparse: 0 after --help, 2 after a usage error
            code = end.code if isinstance(end.code, int) else 2
        _flush_output()
        return code
    except FinetuneError as error:
        errors.print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        return error.exit_code
    except KeyboardInterrupt:
        errors.print("interrupted")
        return 1
    except BrokenPipeError:
        return 1


def _flush_output() -> None:
    """Write what is still buffered: here a failure is an error, at the process's end nobody would take notice.

    Raises:
        RunError: it cannot be written.
    """
    if sys.stdout is None:  # closed by whoever started this
        return
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise RunError(f"standard output cannot be written: {error}") from error


def _run(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="tessera-finetune", allow_abbrev=False, description="Train GPT checkpoints.")
    parser.add_argument(
        "command", metavar="{" + ",".join(COMMANDS) + "}", help="; ".join(f"{k}: {v}" for k, v in COMMANDS.items())
    )
    if not words or words[0] in ("-h", "--help"):
        parser.print_help(sys.stdout if words else sys.stderr)
        return 0 if words else 2
    command, rest = words[0], words[1:]
    if command not in COMMANDS:
        parser.error(f"unknown command {command!r}; there are {', '.join(COMMANDS)}")
    if command in ("tune", "pretrain"):
        from finetune.commands import train

        return train.main(command, rest)
    # transformers imports DeepSpeed, which otherwise looks for devices and says so among what these commands print. The ranks
    # of the two commands above choose for themselves.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    return _main_of(command)(rest)


def _main_of(command: str) -> Callable[[Sequence[str]], int]:
    """The function that runs a command; its module alone is imported."""
    if command == "prepare":
        from finetune.commands.data import prepare

        return prepare
    main: Callable[[Sequence[str]], int] = import_module(f"finetune.commands.{command}").main
    return main
