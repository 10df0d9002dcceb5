"""``tessera-finetune``: train, prepare, evaluate, export. Exit codes: 0 done, 2 usage or bad configuration, 1 anything else."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Final

from rich.console import Console
from rich.markup import escape

from finetune.commands.parser import CommandParser
from finetune.errors import FinetuneError, RunError

_COMMANDS: Final = {
    "tune": ("train", "train a new or existing model from text"),
    "pretrain": ("train", "train a GPT-NeoX, GPT-2 or Llama through a pipeline of stages"),
    "prepare": ("prepare", "tokenise the data of a run ahead of it"),
    "data": ("data", "check: list every faulty record; show: print a row with its targets"),
    "inspect": ("inspect", "what a checkpoint is, what its tensors hold and what is wrong with it"),
    "export": ("export", "write a checkpoint elsewhere, in any dtype"),
    "merge": ("merge", "join a LoRA adapter with its base model"),
    "plan": ("plan", "what a run will need against what there is, without running it"),
    "evaluate": ("evaluate", "loss and perplexity of a checkpoint on text"),
    "predict": ("predict", "complete a file of prompts with a checkpoint"),
    "doctor": ("doctor", "what this machine has and what is missing"),
}
"""Command -> its module in ``finetune.commands``, and what it is for; in the order of ``--help``."""


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
    parser = _parser()
    if not words:
        parser.print_help(sys.stderr)
        return 2
    if not words[0].startswith("-") and words[0] not in _COMMANDS:
        near = difflib.get_close_matches(words[0], _COMMANDS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        parser.error(f"unknown command {words[0]!r}{hint} (there are {', '.join(_COMMANDS)})")
    options = parser.parse_args(words)
    run: Callable[[argparse.Namespace], int] = options.run
    return run(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tessera-finetune", allow_abbrev=False, description="Train GPT checkpoints.")
    commands = parser.add_subparsers(
        dest="subcommand", required=True, metavar="COMMAND", title="commands", parser_class=CommandParser
    )
    for name, (module, purpose) in _COMMANDS.items():
        commands.add_parser(name, help=purpose, description=f"{purpose[0].upper()}{purpose[1:]}.", fill=_filler(name, module))
    return parser


def _filler(command: str, module: str) -> Callable[[CommandParser], None]:
    """Adds the arguments of one command, whose module alone is imported."""

    def fill(parser: CommandParser) -> None:
        if command not in ("tune", "pretrain"):
            # transformers imports DeepSpeed, which otherwise looks for devices and says so among what these commands print.
            # The ranks of the two left out choose for themselves.
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        found = import_module(f"finetune.commands.{module}")
        found.add_arguments(parser)
        parser.set_defaults(run=found.run)

    return fill
