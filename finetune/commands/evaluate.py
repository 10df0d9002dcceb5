"""``tessera-finetune evaluate``: arguments, and what is printed."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from finetune.commands.parser import DTYPES
from finetune.config import DataConfig
from finetune.config.read import Places, apply_overrides, build, describe, split_overrides
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


def main(words: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    described = ((name, meaning) for name, _, meaning in describe(DataConfig, "data.") if name.partition(".")[2] in KEYS)
    keys_text = "\n".join(f"  --{name}\n      {meaning}" for name, meaning in described)
    parser = argparse.ArgumentParser(
        prog="tessera-finetune evaluate",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Loss and perplexity of a checkpoint on text, or on the answers to prompts and in chats, in every format\n"
        "that tune takes. Targets are those the run was trained on, if the checkpoint is a run's, or those of tune's defaults.",
        epilog=f"Keys of data as in tune's file, their values read as YAML:\n\n{keys_text}",
    )
    parser.add_argument("checkpoint", type=Path, metavar="RUN_OR_CHECKPOINT")
    parser.add_argument("--data", nargs="+", required=True, help="files, folders, globs or data sets, as data.train of tune")
    parser.add_argument("--pattern", help="names of the files taken from folders (*); short for --data.pattern")
    parser.add_argument("--seq-len", type=int, help="tokens of a window or sample; unset: the model's longest, at most 1024")
    parser.add_argument("--batch", type=int, default=8, help="windows or samples computed at once (8)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="to compute in (float32)")
    parser.add_argument("--last-word", choices=("line", "document"), help="also predict each one's last word, as LAMBADA does")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    overrides, rest = split_overrides(words, [])
    options = parser.parse_args(rest)
    for name, least in (("seq_len", 2), ("batch", 1)):
        if getattr(options, name) is not None and getattr(options, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}")
    keys = _keys(overrides)
    keys |= {name: given for name in ("pattern", "seq_len") if (given := getattr(options, name)) is not None}
    with without_collection():
        import torch

        from finetune.trained.evaluate import evaluate

    torch.set_num_threads(inventory.usable_cores())
    result = evaluate(
        options.checkpoint,
        options.data,
        batch=options.batch,
        dtype=getattr(torch, options.dtype),
        last_word=options.last_word,
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
    tree: dict[str, Any] = {}
    places: Places = {}
    apply_overrides(tree, places, overrides)
    given = tree.get("data", {})
    config = build(DataConfig, {"train": ["the sources of --data"], **given}, places, "data.")
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
