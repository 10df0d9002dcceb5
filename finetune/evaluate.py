"""``tessera-finetune evaluate``: how well a checkpoint knows a text. One process, no DeepSpeed."""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from finetune.data.pack import TokenStream
from finetune.data.sources import Source, find_files
from finetune.data.tokenise import write_stream
from finetune.data.tokenizer import end_of_text_id, num_ids, open_tokenizer
from finetune.errors import DataError
from finetune.inference import open_trained
from finetune.loss import token_losses
from finetune.model import check_fit

_LONGEST_WINDOW = 1024
_LAST_WORD = re.compile(r"\s\S+$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What a checkpoint makes of a text."""

    loss: float
    """Mean negative log-likelihood of a token, in nats."""
    perplexity: float
    bits_per_byte: float
    """Of the text's UTF-8 bytes: comparable between tokenizers."""
    tokens: int
    text_bytes: int
    last_word_accuracy: float | None = None
    """Share of the items whose last word is exactly what greedy prediction gives after the rest; ``None``: not asked for."""
    last_words: int | None = None
    """Items that this is a share of: those with two words or more."""


Items = Literal["line", "document"]
"""What has a last word: each line of the text, or each whole document."""


def evaluate(
    path: Path,
    text: Sequence[str],
    *,
    pattern: str = "*",
    seq_len: int | None = None,
    batch: int = 8,
    dtype: torch.dtype | None = None,
    last_word: Items | None = None,
) -> Evaluation:
    """Score every token of ``text``, each seen after at most ``seq_len - 1`` others of its own window.

    Args:
        path: a checkpoint, a folder of checkpoints (the latest counts), or a run's folder.
        text: files, folders or globs, as ``data.train``.
        seq_len: window; unset: the model's longest position, at most 1024.
        dtype: to compute in; unset: fp32.
        last_word: also predict the last word of each of these, as the LAMBADA test does.

    Raises:
        ConfigError: the checkpoint, its tokenizer or a text is at fault.
    """
    source = Source(files=find_files(text, pattern, "--data"), text_key="text", invalid_text="refuse")
    trained = open_trained(path, dtype or torch.float32)
    model, folder = trained.model, trained.tokenizer_folder
    longest = int(getattr(model.config, "max_position_embeddings", _LONGEST_WINDOW))
    seq_len = min(longest, _LONGEST_WINDOW) if seq_len is None else seq_len
    tokenizer = open_tokenizer(folder)
    check_fit(model.config, num_ids=num_ids(tokenizer), seq_len=seq_len, key=str(path))
    with tempfile.TemporaryDirectory() as scratch:
        stream, text_bytes = _tokenised(tokenizer, folder, source, Path(scratch), seq_len)
        loss_sum, count = _score(model, stream, batch)
    right, words = (0, 0) if last_word is None else _last_words(model, tokenizer, source, last_word, batch, seq_len)
    loss = loss_sum / count
    perplexity = math.exp(loss) if loss < 700 else math.inf
    bits = loss_sum / math.log(2) / max(1, text_bytes)
    return Evaluation(
        loss=loss,
        perplexity=perplexity,
        bits_per_byte=bits,
        tokens=count,
        text_bytes=text_bytes,
        last_word_accuracy=None if last_word is None else right / words,
        last_words=None if last_word is None else words,
    )


def _tokenised(tokenizer: Tokenizer, folder: Path, source: Source, scratch: Path, seq_len: int) -> tuple[TokenStream, int]:
    """The text as tokens, and its size in bytes.

    Args:
        folder: of the tokenizer.
    """
    file = scratch / "text.bin"
    _, text_bytes = write_stream(tokenizer, source.pieces(), file, "uint32", end_of_text_id(folder, tokenizer))
    stream = TokenStream(file, "uint32", seq_len)
    if stream.num_tokens < 2:
        raise DataError(f"--data: {len(source.files)} files hold only {stream.num_tokens} tokens; a loss needs 2")
    return stream, text_bytes


@torch.no_grad()
def _score(model: PreTrainedModel, stream: TokenStream, batch: int) -> tuple[float, int]:
    loss_sum, count = 0.0, 0

    def add(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        nonlocal loss_sum, count
        loss_sum += float(token_losses(model(input_ids=inputs, use_cache=False).logits, targets))
        count += targets.numel()

    for first in range(0, stream.num_samples, batch):
        last = min(first + batch, stream.num_samples)
        add(*map(torch.from_numpy, stream.samples(np.arange(first, last))))
    tail = tuple(map(torch.from_numpy, stream.tail()))
    if tail[0].numel():
        add(*tail)
    return loss_sum, count


# -- last words


def _last_words(
    model: PreTrainedModel, tokenizer: Tokenizer, source: Source, items: Items, batch: int, longest: int
) -> tuple[int, int]:
    """How many last words are predicted, and how many there are."""
    rows = [row for text in _items(source, items) if (row := _last_word_ids(tokenizer, text, longest)) is not None]
    if not rows:
        raise DataError(f"--last-word: no {items} of the data has two words")
    rows.sort(key=lambda row: len(row[0]))  # of like length together: less is padded
    right = sum(_predicted(model, rows[first : first + batch]) for first in range(0, len(rows), batch))
    return right, len(rows)


def _items(source: Source, items: Items) -> Iterator[str]:
    document = ""
    for piece in source.pieces():
        document += piece.text
        if not piece.ends_document:
            continue
        yield from document.splitlines() if items == "line" else [document]
        document = ""


def _last_word_ids(tokenizer: Tokenizer, text: str, longest: int) -> tuple[list[int], int] | None:
    """Ids of the text, at most ``longest`` of them, and how many at the end are its last word with the space before it."""
    found = _LAST_WORD.search(text.strip())
    if found is None:
        return None
    target = tokenizer.encode(found[0], add_special_tokens=False).ids
    before = tokenizer.encode(text.strip()[: found.start()], add_special_tokens=False).ids
    if len(target) >= longest:
        return None
    return (before + target)[-longest:], len(target)


@torch.no_grad()
def _predicted(model: PreTrainedModel, rows: list[tuple[list[int], int]]) -> int:
    """Rows whose last tokens are each the likeliest after those before them.

    Greedy prediction gives the word exactly then: as long as it is right, what it has before it is the text itself.
    """
    width = max(len(ids) for ids, _ in rows)
    inputs = torch.zeros((len(rows), width), dtype=torch.int64)
    for row, (ids, _) in enumerate(rows):
        inputs[row, : len(ids)] = torch.tensor(ids)  # padded at the end, which causal attention does not see
    logits_BLV = model(input_ids=inputs, use_cache=False).logits
    right = 0
    for row, (ids, count) in enumerate(rows):
        guesses = logits_BLV[row, len(ids) - count - 1 : len(ids) - 1].argmax(dim=-1)
        right += int(torch.equal(guesses, inputs[row, len(ids) - count : len(ids)]))
    return right
