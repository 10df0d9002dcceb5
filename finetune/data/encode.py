"""Samples to token ids, with a mask of the tokens that are targets. No token lies across the border of a target.

A prompt's tokens are those a server makes of the prompt alone: where the tokenizer would join characters of the prompt and of
the answer in one token, the text is tokenised in parts instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from checkpoint.text.tokenizer import Tokenizer
from finetune.data.chat import ChatTargets
from finetune.data.readers.items import Fault, Piece, Tokens
from finetune.data.samples import Chat, Completion, Malformed

Ids = NDArray[np.int64]
Mask = NDArray[np.uint8]
Span = tuple[int, int]

_NO_TEMPLATE = (
    "is a conversation, and the tokenizer has no chat template; name one by data.chat_template: a Jinja file, or chatml, "
    "plain or instruct"
)
_NO_TARGET = "has no turn of {roles} to learn; add one, leave the record out, or name other roles by data.train_roles"


@dataclass(frozen=True, slots=True)
class Encoded:
    """Tokens of a sample, or of a piece of a document."""

    ids: Ids
    learned: Mask | None
    """1 where the token is a target; ``None``: everywhere."""
    ends_document: bool
    text_bytes: int
    stop_id: int | None = None
    """The special token that ends the last turn."""


@dataclass(frozen=True, slots=True)
class _Pending:
    """Text with the ranges that are targets, on its way to tokens."""

    text: str
    spans: tuple[Span, ...]
    ends_with_target: bool
    """Whether the end-of-text token is added and learned, unless a special token is there already."""
    bos: bool
    """Whether the tokenizer's own leading token is put in front: a template writes its own."""


class Encoder:
    """Encodes the samples of one source. Deterministic, whatever is encoded together."""

    def __init__(
        self, tokenizer: Tokenizer, end_id: int, template: ChatTargets | None, train_on: str, roles: Sequence[str]
    ) -> None:
        self._tokenizer, self._end_id, self._template = tokenizer, end_id, template
        self._train_on, self._roles = train_on, tuple(roles)
        self._num_ids = tokenizer.num_ids
        self._special_ids = tokenizer.special_ids | {end_id}

    def controls_in(self, text: str) -> list[str]:
        """The special tokens that ``text`` spells out."""
        return [control for control in self._tokenizer.special_texts if control in text]

    # -- from readers' items

    def encode(self, items: Sequence[Piece | Tokens | Chat | Completion]) -> list[Encoded | Fault]:
        """Encode what was read, in order; what cannot be is a fault."""
        prepared = [self._prepare(item) for item in items]
        texts = list(chain.from_iterable(self._texts(item) for item in prepared))
        batch = self._tokenizer.backend.encode_batch_fast(texts, add_special_tokens=False) if texts else []
        encodings = iter([encoding.ids for encoding in batch])
        return [self._finish(item, encodings) for item in prepared]

    def _prepare(self, item: Piece | Tokens | Chat | Completion) -> Piece | Tokens | _Pending | Fault:
        if isinstance(item, Piece | Tokens):
            return item
        try:
            return self._chat(item) if isinstance(item, Chat) else self._completion(item)
        except Malformed as error:
            return Fault(str(error))

    def _chat(self, chat: Chat) -> _Pending:
        if self._template is None:
            raise Malformed(_NO_TEMPLATE)
        if self._train_on == "all":
            text = self._template.render_whole(chat)
            return _Pending(text, ((0, len(text)),), ends_with_target=True, bos=False)
        wanted = [message["role"] in self._roles for message in chat.messages]
        if self._train_on == "last" and any(wanted):
            last = max(index for index, want in enumerate(wanted) if want)
            wanted = [index == last for index in range(len(wanted))]
        rendered = self._template.render(chat, wanted)
        if not rendered.spans:
            raise Malformed(_NO_TARGET.format(roles=" or ".join(self._roles)))
        return _Pending(rendered.text, rendered.spans, ends_with_target=rendered.ends_with_turn, bos=False)

    def _completion(self, sample: Completion) -> _Pending:
        text = sample.prompt + sample.completion
        begin = 0 if self._train_on == "all" else len(sample.prompt)
        return _Pending(text, ((begin, len(text)),), ends_with_target=True, bos=True)

    # -- tokens

    def _texts(self, item: Piece | Tokens | _Pending | Fault) -> Iterator[str]:
        """What has to be tokenised for an item: the whole, and its parts between the borders of targets."""
        if isinstance(item, Piece):
            yield item.text
        elif isinstance(item, _Pending):
            if self._needs_whole(item):
                yield item.text
            yield from _parts(item.text, item.spans)

    def _needs_whole(self, item: _Pending) -> bool:
        """Whether the parts alone could be other tokens than a server's. A prompt and one answer are just its two parts."""
        return self._tokenizer.prepends_space or len(item.spans) > 1

    def _finish(self, item: Piece | Tokens | _Pending | Fault, encodings: Iterator[list[int]]) -> Encoded | Fault:
        if isinstance(item, Fault):
            return item
        if isinstance(item, Piece):
            ids = next(encodings)
            ids = [*ids, self._end_id] if item.ends_document else ids
            return Encoded(np.asarray(ids, dtype=np.int64), None, item.ends_document, _size(item.text))
        if isinstance(item, Tokens):
            return self._given(item)
        whole = next(encodings) if self._needs_whole(item) else None
        parts = [next(encodings) for _ in _parts(item.text, item.spans)]
        return self._masked(item, whole, parts)

    def _given(self, item: Tokens) -> Encoded | Fault:
        ids, learned = item.ids, item.learned
        if ids.min() < 0 or ids.max() >= self._num_ids:
            wrong = ids[(ids < 0) | (ids >= self._num_ids)][0]
            return Fault(
                f"holds id {wrong}; the tokenizer's ids are 0 to {self._num_ids - 1}: it is the data of another tokenizer"
            )
        if ids[-1] != self._end_id:
            ids = np.append(ids, self._end_id)
            learned = None if learned is None else np.append(learned, learned[-1])
        return Encoded(ids, learned, ends_document=True, text_bytes=0)

    def _masked(self, item: _Pending, whole: list[int] | None, parts: list[list[int]]) -> Encoded:
        targets = [index % 2 == 1 for index in range(len(parts))]
        ids, mask = list(chain.from_iterable(parts)), _mask_of(parts, targets)
        if whole is not None and ids != whole:
            ids, mask = self._across_borders(item, whole, ids, mask)
        stop = None
        if item.ends_with_target:
            last = self._last_target(ids, mask)
            if last in self._special_ids:
                stop = last
            else:
                ids, mask, stop = [*ids, self._end_id], [*mask, 1], self._end_id
        num_used = len(mask) - mask[::-1].index(1) if 1 in mask else len(mask)  # nothing is learned from what follows
        ids, mask = ids[:num_used], mask[:num_used]
        if item.bos:
            leading = self._tokenizer.leading_ids
            ids, mask = [*leading, *ids], [0] * len(leading) + mask
        return Encoded(
            np.asarray(ids, dtype=np.int64),
            np.asarray(mask, dtype=np.uint8),
            ends_document=True,
            text_bytes=_size(item.text),
            stop_id=stop,
        )

    def _last_target(self, ids: list[int], mask: list[int]) -> int | None:
        """The last token of the last target, when only white space follows it."""
        index = len(mask) - 1
        while index >= 0 and not mask[index]:
            index -= 1
        while index >= 0 and mask[index] and not self._tokenizer.decode([ids[index]], skip_special_tokens=False).strip():
            index -= 1
        return ids[index] if index >= 0 and mask[index] else None

    def _across_borders(self, item: _Pending, whole: list[int], ids: list[int], mask: list[int]) -> tuple[list[int], list[int]]:
        """The whole's tokens, if each border lies between two of them and a prompt alone has the same; else the parts'."""
        borders = sorted({border for span in item.spans for border in span} - {0, len(item.text)})
        heads = self._tokenizer.backend.encode_batch_fast([item.text[:border] for border in borders], add_special_tokens=False)
        counts = [len(head.ids) for head in heads]
        if all(whole[:count] == head.ids for count, head in zip(counts, heads, strict=True)):
            where = dict(zip(borders, counts, strict=True)) | {0: 0, len(item.text): len(whole)}
            mask = [0] * len(whole)
            for begin, end in item.spans:
                mask[where[begin] : where[end]] = [1] * (where[end] - where[begin])
            return whole, mask
        if not self._tokenizer.prepends_space:
            return ids, mask
        # This tokenizer puts a space before whatever it is given, so parts of a text are not its tokens.
        encoding = self._tokenizer.backend.encode(item.text, add_special_tokens=False)
        inside = [_is_inside(item.text, offsets, item.spans) for offsets in encoding.offsets]
        return encoding.ids, inside


def _parts(text: str, spans: Iterable[Span]) -> Iterator[str]:
    """The text cut at the borders: context, target, context, …; parts may be empty."""
    at = 0
    for begin, end in spans:
        yield text[at:begin]
        yield text[begin:end]
        at = end
    yield text[at:]


def _mask_of(parts: Sequence[Sequence[int]], targets: Sequence[bool]) -> list[int]:
    return [int(target) for part, target in zip(parts, targets, strict=True) for _ in part]


def _is_inside(text: str, offsets: Span, spans: Iterable[Span]) -> int:
    """Whether a token's characters, but for leading white space, are those of a target."""
    begin, end = offsets
    begin += len(text[begin:end]) - len(text[begin:end].lstrip())
    return int(any(first <= min(begin, end - 1) and end <= last for first, last in spans))


def _size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8"))
