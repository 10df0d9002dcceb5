"""``tessera-finetune evaluate``: arguments, and what is printed."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from configuration import Tree, keys_of
from finetune.commands.parser import DTYPES, CommandParser, add_given, given_of, require_option
from finetune.config import DataConfig
from finetune.config.load import READER
from finetune.errors import ConfigError
from finetune.machine import inventory
from finetune.machine.process import without_collection

KEYS: Final = (
    "format",
    "pattern",
    "text_key",
    "prompt_key",
    "completion_key",
    "messages_key",
    "chat_template",
    "train_on",
    "train_roles",
    "seq_len",
    "too_long",
    "invalid_text",
)
"""Keys of ``data`` that say what is measured; the others are about training."""


def add_arguments(parser: CommandParser) -> None:
    """What the command takes."""
    parser.description = (
        "Loss and perplexity of a checkpoint on text, or on the answers to prompts and in chats, in every format\n"
        "that tune takes. Targets are those the run was trained on, if the checkpoint is a run's, or those of tune's defaults."
    )
    parser.take_keys((), _keys_of_data)
    parser.add_argument("checkpoint", type=Path, metavar="RUN_OR_CHECKPOINT")
    parser.add_argument("--data", nargs="+", required=True, help="files, folders, globs or data sets, as data.train of tune")
    parser.add_argument("--pattern", help="names of the files taken from folders (*); short for --data.pattern")
    parser.add_argument("--seq-len", type=int, help="tokens of a window or sample; unset: the model's longest, at most 1024")
    parser.add_argument("--batch", type=int, default=8, help="windows or samples computed at once (8)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="to compute in (float32)")
    parser.add_argument("--last-word", choices=("line", "document"), help="also predict each one's last word, as LAMBADA does")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    add_given(parser)


def _keys_of_data() -> str:
    taken = (key for key in keys_of(DataConfig, "data.") if key.name.partition(".")[2] in KEYS)
    keys = "\n".join(f"  --{key.name}\n      {key.meaning}" for key in taken)
    return f"Keys of data as in tune's file, their values read as YAML:\n\n{keys}"


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    for name, least in (("seq_len", 2), ("batch", 1)):
        value = getattr(options, name)
        require_option(value is None or value >= least, name, value, f"be at least {least}")
    keys = _keys(options.overrides)
    keys |= {name: given for name in ("pattern", "seq_len") if (given := getattr(options, name)) is not None}
    with without_collection():
        import torch

        from checkpoint.dtypes import FLOAT_TYPES
        from finetune.trained.evaluate import evaluate

    torch.set_num_threads(inventory.usable_cores())
    result = evaluate(
        options.checkpoint,
        options.data,
        batch=options.batch,
        dtype=FLOAT_TYPES[options.dtype],
        last_word=options.last_word,
        given=given_of(options),
        **keys,
    )
    _show(asdict(result), as_json=options.json)
    return 0


def _keys(overrides: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """The given keys of ``data``, as its configuration has them.

    Raises:
        ConfigError: there is no such key, or its value breaks a rule.
    """
    for name, _ in overrides:
        section, _, key = name.partition(".")
        if section != "data" or key not in KEYS:
            raise ConfigError(f"command line, --{name}: evaluate takes --data.KEY of {', '.join(KEYS)}")
    tree = Tree()
    READER.lay_over(tree, overrides)
    given = tree.values.get("data", {})
    with_sources = Tree({"train": ["the sources of --data"], **given}, tree.places)
    config = READER.build(DataConfig, with_sources, "data.")
    return {key: getattr(config, key) for key in given}


def _show(result: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(result) + "\n")
        return
    bits = "" if result["bits_per_byte"] is None else f"bits per byte {result['bits_per_byte']:.4f}  "
    of = f"{result['tokens']:,} tokens"
    if result["samples"]:
        of += f" that are targets, {result['samples']:,} samples"
    if result["dropped"]:
        of += f"; {result['dropped']:,} left out as too long"
    sys.stdout.write(f"loss {result['loss']:.4f}  perplexity {result['perplexity']:.3f}  {bits}({of})\n")
    if result["last_word_accuracy"] is not None:
        sys.stdout.write(f"last word {result['last_word_accuracy']:.2%} of {result['last_words']:,}\n")
