"""What a request message may hold, counted on its bytes before anything is made of them.

A message of a few megabytes can hold millions of fields, each of which costs a hundred times its bytes once it is an object.
Counting stops at the first bound that is passed, so that its own cost is bounded too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from serve.config import AdmissionConfig
from serve.errors import Violation

MAX_FIELDS: Final = 100_000
"""Fields of one message, those of its submessages included; packed numbers are one field."""

MAX_OTHER_BYTES: Final = 65_536
"""Bytes of one string that has no bound of its own."""

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BYTES: Final = 10
_CONTINUED: Final = bytes(range(128, 256))
"""Bytes of a number that are not its last."""


def request_bounds(limits: AdmissionConfig) -> Mapping[str, int]:
    """Full name of a field -> how much of it one message may hold: UTF-8 bytes of a single text, else entries.

    The same message may be a prompt or an item, so these are the widest limits; the checks of each call are narrower.
    """
    return {
        "serve.v1.GenerateRequest.text": limits.max_prompt_bytes,
        "serve.v1.TokenizeRequest.text": limits.max_prompt_bytes,
        "serve.v1.ChatMessage.content": limits.max_prompt_bytes,
        "serve.v1.ScoreItem.text": limits.max_prompt_bytes,
        "serve.v1.ScoreItem.context_text": limits.max_prompt_bytes,
        "serve.v1.Chat.messages": limits.max_chat_messages,
        "serve.v1.ScoreRequest.items": limits.max_score_items,
        "serve.v1.TokenIds.ids": limits.max_queued_tokens,
        "serve.v1.DetokenizeRequest.token_ids": limits.max_queued_tokens,
        "serve.v1.Sampling.logit_bias": limits.max_logit_bias,
        "serve.v1.Sampling.allowed_ids": limits.max_id_list,
        "serve.v1.Sampling.banned_ids": limits.max_id_list,
        "serve.v1.Stopping.stop_strings": limits.max_stop_strings,
        "serve.v1.Stopping.stop_ids": limits.max_stop_ids,
    }


@dataclass(frozen=True, slots=True)
class _Field:
    """What counting needs to know of one field."""

    path: str
    listed: str
    """Path of the list it is in; empty if it is in none."""
    full_name: str
    is_repeated: bool
    is_number: bool
    is_text: bool
    inner: _Shape | None


_Shape = Mapping[int, _Field]
"""The fields of a message by number."""


@dataclass(slots=True)
class Census:
    """Counts the fields of one message."""

    data: bytes
    bounds: Mapping[str, int]
    request_id: str = ""
    """The message's own, where it came before the bound that was passed."""
    _num_fields: int = 0
    _counts: dict[str, int] = field(default_factory=dict)

    def take(self, descriptor: Descriptor) -> Violation | None:
        """The first bound that is passed. Bytes that are no message are left for the parser to refuse."""
        try:
            self._walk(_shape(descriptor, "", ""), 0, len(self.data))
        except _Passed as passed:
            return passed.violation
        except IndexError:
            return None
        return None

    def _walk(self, shape: _Shape, position: int, end: int) -> None:
        data = self.data
        while position < end:
            tag, position = _varint(data, position)
            self._num_fields += 1
            if self._num_fields > MAX_FIELDS:
                raise _Passed("request", f"has more than {MAX_FIELDS} fields")
            known = shape.get(tag >> 3)
            wire_type, start = tag & 7, position
            if wire_type == _VARINT:
                _, position = _varint(data, position)
            elif wire_type == _FIXED64:
                position += 8
            elif wire_type == _FIXED32:
                position += 4
            elif wire_type == _LENGTH:
                size, start = _varint(data, position)
                position = start + size
                if position > end:
                    raise IndexError
            # Else it begins or ends a group. No message here has one: what is inside counts as if it stood outside.
            if known is not None:
                self._count(known, wire_type, start, position)

    def _count(self, known: _Field, wire_type: int, start: int, end: int) -> None:
        if wire_type != _LENGTH:
            if known.is_repeated:
                self._add(known, 1)
            return
        if known.is_number:
            self._add_packed(known, start, end)
            return
        if known.is_repeated:
            self._add(known, 1)
        if known.inner is not None:
            self._walk(known.inner, start, end)
        elif known.is_text and not known.is_repeated and known.full_name in self.bounds:
            self._add(known, end - start)
        elif end - start > MAX_OTHER_BYTES:
            raise _Passed(known.path, f"has {end - start} bytes; the limit is {MAX_OTHER_BYTES}")
        elif known.path == "request_id":
            self.request_id = self.data[start:end].decode(errors="ignore")

    def _add_packed(self, known: _Field, start: int, end: int) -> None:
        limit = self.bounds.get(known.full_name, MAX_FIELDS)
        num_bytes = end - start
        if num_bytes > limit * _MAX_VARINT_BYTES:  # too many however long each is
            self._add(known, num_bytes // _MAX_VARINT_BYTES)
        else:
            self._add(known, len(self.data[start:end].translate(None, _CONTINUED)))

    def _add(self, known: _Field, amount: int) -> None:
        total = self._counts.get(known.full_name, 0) + amount
        self._counts[known.full_name] = total
        limit = self.bounds.get(known.full_name, MAX_FIELDS)
        if total > limit:
            if known.is_repeated:
                raise _Passed(known.path, f"has more than {limit} entries, which is the limit")
            if known.listed:
                raise _Passed(known.listed, f"have more than {limit} bytes of text together, which is the limit")
            raise _Passed(known.path, f"has {total} bytes; the limit is {limit}")


class _Passed(Exception):
    """A bound was passed."""

    def __init__(self, path: str, rule: str) -> None:
        super().__init__(path)
        self.violation = Violation(path, rule)


@cache
def _shape(descriptor: Descriptor, prefix: str, listed: str) -> _Shape:
    """The fields of a message. No message of the contract holds one of its own kind."""
    return {number: _known(known, prefix, listed) for number, known in descriptor.fields_by_number.items()}


def _known(known: FieldDescriptor, prefix: str, listed: str) -> _Field:
    # What the checks call a prompt's fields: by the name of the choice they are one of.
    choice = "prompt." if known.containing_oneof is not None and known.containing_oneof.name == "prompt" else ""
    path = f"{prefix}{choice}{known.name}"
    is_text = known.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
    return _Field(
        path=path,
        listed=listed,
        full_name=known.full_name,
        is_repeated=known.is_repeated,
        is_number=not is_text and known.message_type is None,
        is_text=is_text,
        inner=None
        if known.message_type is None
        else _shape(known.message_type, f"{path}.", path if known.is_repeated else listed),
    )


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """(value, position behind it); ``IndexError`` where the bytes end inside it."""
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
        shift += 7
        if shift > 7 * _MAX_VARINT_BYTES:
            raise IndexError
