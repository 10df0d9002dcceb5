"""``data show``: one row as the model sees it, targets told from context."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.text import Text

from checkpoint.text.tokenizer import Tokenizer
from finetune.data.prepared import Prepared
from finetune.data.rows import open_rows
from finetune.data.shards import ShardTokens, documents_between
from finetune.data.tokenizer import open_tokenizer
from finetune.errors import ConfigError

_TARGET, _CONTEXT, _BORDER = "bold green", "dim", "cyan"
_MARKS = ("⟦", "⟧")
"""Around targets, where there are no colours."""


def show_row(prepared: Prepared, number: int, console: Console) -> None:
    """Print a training row, sample by sample.

    Raises:
        ConfigError: there is no such row.
    """
    rows = open_rows(prepared, "train")
    if not 0 <= number < rows.num_samples:
        raise ConfigError(f"--row is {number}; it must be from 0 to {rows.num_samples - 1}, the rows of a pass")
    tokenizer = open_tokenizer(prepared.tokenizer_folder)
    folders = [Path(shard) for shard in prepared.shards]
    tokens = ShardTokens(folders, prepared.dtype)
    spans = rows.spans(number)
    samples = [
        (place, *tokens.read(shard, first, last))
        for shard, begin, end in spans
        for place, first, last in documents_between(folders[shard], begin, end)
    ]
    used = sum(len(ids) for _, ids, _ in samples) - (1 if prepared.packing == "join" else len(samples))
    targets = 0
    body: list[Text] = []
    for place, ids, learned in samples:
        # What nothing precedes in its segment cannot be predicted.
        first = prepared.packing != "join" or not body
        mask = [(learned is None or bool(mark)) for mark in (learned if learned is not None else [1] * len(ids))]
        mask[0] = mask[0] and not first
        targets += sum(mask)
        body.append(Text(f"── {place}", style=_BORDER))
        body.append(_painted(tokenizer, ids.tolist(), mask, plain=not console.is_terminal))
    width = prepared.seq_len
    console.print(
        f"row {number} of {rows.num_samples:,}: {len(samples)} samples, {used} of {width} places used, {targets} targets "
        f"({_legend(console)})",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    for line in body:
        console.print(line, soft_wrap=True)
    if used < width:
        console.print(Text(f"── {width - used} places of padding", style=_BORDER))


def _legend(console: Console) -> str:
    return "targets are green" if console.is_terminal else f"targets are between {_MARKS[0]} and {_MARKS[1]}"


def _painted(tokenizer: Tokenizer, ids: list[int], mask: list[bool], *, plain: bool) -> Text:
    text = Text()
    for learned, group in groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1]):
        words = tokenizer.decode([token for token, _ in group], skip_special_tokens=False)
        if plain:
            text.append(f"{_MARKS[0]}{words}{_MARKS[1]}" if learned else words)
        else:
            text.append(words, style=_TARGET if learned else _CONTEXT)
    return text
