"""``tessera-finetune evaluate``: how well a checkpoint knows a text, or what it was to answer. One process, no DeepSpeed."""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import PreTrainedModel

from checkpoint.given import NOTHING_GIVEN, Given
from checkpoint.model.config import CONFIG
from checkpoint.text.tokenizer import Tokenizer
from finetune.config import DataConfig, ModelConfig, RunConfig, TokenizerConfig, TuneConfig
from finetune.config.load import READER
from finetune.data.encode import Encoded
from finetune.data.inputs import Inputs
from finetune.data.layout import too_long_rule
from finetune.data.readers import Fault
from finetune.data.settings import prepare_encoding
from finetune.data.sources import Source, place_of, source_of, units_of
from finetune.data.targets import IGNORE_INDEX
from finetune.data.tokenizer import open_tokenizer
from finetune.data.workers import encoded_items, encoder_of
from finetune.errors import DataError
from finetune.model.build import check_fit
from finetune.output.folder import run_of
from finetune.trained.open import open_trained
from finetune.trained.scoring import Scorer

_LONGEST_WINDOW = 1024
_LAST_WORD = re.compile(r"\s\S+$")
_MASKING = ("train_on", "train_roles")
"""Keys of ``data`` that a run's checkpoints are measured with as it was trained, unless they are given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What a checkpoint makes of a text."""

    loss: float
    """Mean negative log-likelihood of a target, in nats."""
    perplexity: float
    bits_per_byte: float | None
    """The loss in bits for each UTF-8 byte: comparable between tokenizers. ``None`` for prompts, chats and token ids."""
    tokens: int
    """Targets. Of text that is every token but the first; of prompts and chats what ``train_on`` and ``train_roles`` say."""
    text_bytes: int
    """UTF-8 bytes of all that was read, prompts too."""
    samples: int
    """Prompts with their answers, and chats; 0 for text."""
    dropped: int
    """Further ones, left out: too long for ``seq_len``, or, once cut, without a target."""
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
    seq_len: int | None = None,
    batch: int = 8,
    dtype: torch.dtype | None = None,
    last_word: Items | None = None,
    given: Given = NOTHING_GIVEN,
    **data: Any,
) -> Evaluation:
    """Score every target of ``text``: of text every token, each seen after at most ``seq_len - 1`` others of its own window;
    of a prompt with its answer, or of a chat, the tokens that ``tune`` would train on, each seen after all before it.

    Args:
        path: a checkpoint, a folder of checkpoints (the latest counts), or a run's folder.
        text: sources as ``data.train`` takes them.
        seq_len: window, and longest sample; unset: the model's longest position, at most 1024.
        dtype: to compute in; unset: fp32.
        last_word: also predict the last word of each of these, as the LAMBADA test does; for text alone.
        given: what the checkpoint's files leave open.
        data: keys of ``data`` as in ``tune``, such as ``text_key``. Of a run's checkpoint, ``train_on`` and ``train_roles`` are
            the run's unless they are given.

    Raises:
        ConfigError: the checkpoint, its tokenizer or a text is at fault.
    """
    settings = DataConfig(train=tuple(dict.fromkeys(text)), **{**_masking_of(path), **data})
    sources = _sources(settings)
    if last_word is not None and any(source.masked for source in sources):
        raise DataError("--last-word: is for text; the data holds prompts or chats")
    trained = open_trained(path, dtype or torch.float32, given)
    model, folder = trained.model, trained.tokenizer_folder
    longest = int(getattr(model.config, "max_position_embeddings", _LONGEST_WINDOW))
    settings = replace(settings, seq_len=min(longest, _LONGEST_WINDOW) if seq_len is None else seq_len)
    tokenizer = open_tokenizer(folder)
    check_fit(model.config, num_ids=tokenizer.num_ids, seq_len=settings.seq_len, key=str(path))
    scored = _scored(model, folder, sources, settings, batch)
    scorer = scored.scorer
    right, words = (0, 0) if last_word is None else _last_words(model, tokenizer, sources, last_word, batch, settings.seq_len)
    loss = scorer.loss_sum / scorer.num_targets
    whole_text = scored.text_bytes > 0 and not scored.samples and not scored.dropped
    return Evaluation(
        loss=loss,
        perplexity=math.exp(loss) if loss < 700 else math.inf,
        bits_per_byte=scorer.loss_sum / math.log(2) / scored.text_bytes if whole_text else None,
        tokens=scorer.num_targets,
        text_bytes=scored.text_bytes,
        samples=scored.samples,
        dropped=scored.dropped,
        last_word_accuracy=None if last_word is None else right / words,
        last_words=None if last_word is None else words,
    )


def _masking_of(path: Path) -> dict[str, Any]:
    """What the run that ``path`` is of, or in, had as targets; nothing where there is no run."""
    run = run_of(path)
    data = {} if run is None else READER.read(run / "config.yaml").values.get("data")
    found = {key: data[key] for key in _MASKING if key in data} if isinstance(data, dict) else {}
    return {key: tuple(value) if isinstance(value, list) else value for key, value in found.items()}


def _sources(data: DataConfig) -> tuple[Source, ...]:
    """The sources, each of their files once."""
    sources, seen = [], set[Path]()
    for entry in data.sources("train"):
        source = source_of(data, entry, "--data")
        files = tuple(file for file in source.files if file not in seen)
        seen.update(files)
        sources += [replace(source, files=files)] if files else []
    return tuple(sources)


@dataclass(slots=True)
class _Scored:
    """What was read, and its losses."""

    scorer: Scorer
    text_bytes: int = 0
    samples: int = 0
    dropped: int = 0


def _scored(model: PreTrainedModel, folder: Path, sources: Sequence[Source], data: DataConfig, batch: int) -> _Scored:
    """Everything in the sources, encoded as ``tune`` does and scored as it is read; nothing is kept.

    Args:
        folder: of the tokenizer.
    """
    scored = _Scored(Scorer(model, window=data.seq_len, batch=batch))
    with tempfile.TemporaryDirectory() as scratch:
        config = TuneConfig(
            run=RunConfig(output=scratch),
            data=data,
            model=ModelConfig(path=str(folder)),
            tokenizer=TokenizerConfig(path=str(folder)),
        )
        inputs = Inputs(train=tuple(sources), held_out=(), packing="none")
        tells = (folder / CONFIG).is_file()  # an adapter's folder does not
        encoder, _ = encoder_of(prepare_encoding(config, inputs, Path(scratch), lambda _: None, of_model=tells))
        for source in sources:
            for unit in units_of(source):
                for part, position, item in encoded_items(encoder, source, unit):
                    wrong = _add(scored, item, data, as_sample=source.masked)
                    if wrong is not None:
                        raise DataError(f"{place_of(unit[part], position)}: {wrong}")
    scored.scorer.finish()
    if not scored.scorer.num_targets:
        count = sum(len(source.files) for source in sources)
        if any(source.masked for source in sources):
            raise DataError(f"--data: {count} files hold no target in samples of at most {data.seq_len + 1} tokens")
        raise DataError(f"--data: {count} files hold only {scored.scorer.stream_tokens} tokens; a loss needs 2")
    return scored


def _add(scored: _Scored, item: Encoded | Fault, data: DataConfig, *, as_sample: bool) -> str | None:
    """Score an item, or treat it as ``data.too_long`` says; what is wrong with it, if it is refused."""
    if isinstance(item, Fault):
        return item.message
    scored.text_bytes += item.text_bytes
    ids, learned = item.ids, item.learned
    if not as_sample:
        scored.scorer.add_text(ids)
        return None
    if len(ids) > data.seq_len + 1:
        if data.too_long == "refuse":
            return too_long_rule(len(ids), data.seq_len)
        ids = ids[: data.seq_len + 1] if data.too_long == "cut" else ids[:0]
    targets = ids[1:] if learned is None else np.where(learned[1 : len(ids)], ids[1:], IGNORE_INDEX)
    if (targets == IGNORE_INDEX).all():
        scored.dropped += 1
    else:
        scored.samples += 1
        scored.scorer.add_sample(ids[:-1], targets)
    return None


# -- last words


def _last_words(
    model: PreTrainedModel, tokenizer: Tokenizer, sources: Sequence[Source], items: Items, batch: int, longest: int
) -> tuple[int, int]:
    """How many last words are predicted, and how many there are."""
    texts = chain.from_iterable(_items(source, items) for source in sources)
    rows = [row for text in texts if (row := _last_word_ids(tokenizer, text, longest)) is not None]
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
    target = tokenizer.encode(found[0], add_special_tokens=False)
    before = tokenizer.encode(text.strip()[: found.start()], add_special_tokens=False)
    if len(target) >= longest:
        return None
    return [*before, *target][-longest:], len(target)


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
