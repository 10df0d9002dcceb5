"""``tessera-finetune evaluate``: loss, perplexity and bits per byte of a checkpoint on text. One process, no DeepSpeed."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from checkpoint import Checkpoint, CheckpointError, open_checkpoint
from finetune.data.pack import TokenStream
from finetune.data.sources import Source, find_files
from finetune.data.tokenise import write_stream
from finetune.data.tokenizer import end_of_text_id, open_tokenizer
from finetune.errors import ConfigError, DataError
from finetune.folders import checkpoint_folder
from finetune.loss import token_losses
from finetune.model import build_empty, check_fit, config_of, fill, shapes_of, tied_names

_LONGEST_WINDOW = 1024


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


def evaluate(
    path: Path,
    text: Sequence[str],
    *,
    pattern: str = "*",
    seq_len: int | None = None,
    batch: int = 8,
    dtype: torch.dtype | None = None,
) -> Evaluation:
    """Score every token of ``text``, each seen after at most ``seq_len - 1`` others of its own window.

    Args:
        path: a checkpoint, a folder of checkpoints (the latest counts), or a run's folder.
        text: files, folders or globs, as ``data.train``.
        seq_len: window; unset: the model's longest position, at most 1024.
        dtype: to compute in; unset: fp32.

    Raises:
        ConfigError: the checkpoint, its tokenizer or a text is at fault.
    """
    source = Source(files=find_files(text, pattern, "--data"), text_key="text", invalid_text="refuse")
    try:
        with open_checkpoint(checkpoint_folder(path)) as checkpoint, tempfile.TemporaryDirectory() as scratch:
            model = load_model(checkpoint, dtype or torch.float32)
            longest = int(getattr(model.config, "max_position_embeddings", _LONGEST_WINDOW))
            seq_len = min(longest, _LONGEST_WINDOW) if seq_len is None else seq_len
            stream, text_bytes = _tokenised(checkpoint, source, Path(scratch), seq_len)
            check_fit(model.config, num_ids=checkpoint.tokenizer_vocab_size or 0, seq_len=seq_len, key=str(path))
            loss_sum, count = _score(model, stream, batch)
    except CheckpointError as error:
        raise ConfigError(f"{path}: {error}") from error
    loss = loss_sum / count
    perplexity = math.exp(loss) if loss < 700 else math.inf
    bits = loss_sum / math.log(2) / max(1, text_bytes)
    return Evaluation(loss=loss, perplexity=perplexity, bits_per_byte=bits, tokens=count, text_bytes=text_bytes)


def _tokenised(checkpoint: Checkpoint, source: Source, folder: Path, seq_len: int) -> tuple[TokenStream, int]:
    """The text as tokens of the checkpoint's tokenizer, and its size in bytes."""
    tokenizer = open_tokenizer(checkpoint.path)
    file = folder / "text.bin"
    _, text_bytes = write_stream(tokenizer, source.pieces(), file, "uint32", end_of_text_id(checkpoint.path, tokenizer))
    stream = TokenStream(file, "uint32", seq_len)
    if stream.num_tokens < 2:
        raise DataError(f"--data: {len(source.files)} files hold only {stream.num_tokens} tokens; a loss needs 2")
    return stream, text_bytes


def load_model(checkpoint: Checkpoint, dtype: torch.dtype) -> PreTrainedModel:
    """The whole model of a checkpoint, filled tensor by tensor, ready to compute losses.

    Raises:
        CheckpointError: the tensors are not those of config.json.
    """
    model = build_empty(config_of(checkpoint), dtype, nullcontext())
    tied = tied_names(model)
    checkpoint.check_tensors(shapes_of(model), tied=tied)
    fill(model, lambda name: checkpoint.read(checkpoint.resolve(name, tied), dtype=dtype), _always)
    return model.eval()


@contextmanager
def _always(parameters: list[nn.Parameter]) -> Iterator[bool]:
    yield True


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
