"""What the argument parsers of the commands have in common."""

from __future__ import annotations

import argparse
from typing import Any

DTYPES = ("float32", "bfloat16", "float16")
"""Types that weights are written in, by the names that ``--dtype`` takes."""
COMMANDS = {
    "tune": "train a new or existing model from text",
    "pretrain": "train a GPT-NeoX, GPT-2 or Llama through a pipeline of stages",
    "prepare": "tokenise the data of a run ahead of it",
    "data": "check: list every faulty record; show: print a row with its targets",
    "export": "write a checkpoint elsewhere, in any dtype",
    "merge": "join a LoRA adapter with its base model",
    "plan": "what a run will need against what there is, without running it",
    "evaluate": "loss and perplexity of a checkpoint on text",
    "predict": "complete a file of prompts with a checkpoint",
    "doctor": "what this machine has and what is missing",
}
"""What each command is for, in the order of ``--help``."""


def command_parser(command: str, **options: Any) -> argparse.ArgumentParser:
    """An argument parser of one command; ``options`` are those of ``argparse.ArgumentParser``."""
    return argparse.ArgumentParser(
        prog=f"tessera-finetune {command}", description=COMMANDS[command], allow_abbrev=False, **options
    )
