"""What a message may hold is counted on its bytes, to the last entry."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.message import Message

from serve.config import AdmissionConfig
from serve.rpc.bounds import MAX_FIELDS, MAX_OTHER_BYTES, Census, request_bounds
from serve.v1 import inference_pb2, tokenizer_pb2

FOUR = dict.fromkeys(AdmissionConfig.__slots__, 4)
BOUNDS = request_bounds(AdmissionConfig(**FOUR))  # type: ignore[arg-type]

GENERATE = inference_pb2.GenerateRequest
SCORE = inference_pb2.ScoreRequest


def told(message: Message) -> tuple[str, str] | None:
    violation = Census(message.SerializeToString(), BOUNDS).take(message.DESCRIPTOR)
    return None if violation is None else (violation.field, violation.rule)


def with_entries(message: Any, path: str, number: int) -> Message:
    """A message with this many entries, or bytes of text, at ``path``."""
    *parents, name = path.split(".")
    for parent in parents:
        inner = getattr(message, parent)
        message = inner.add() if hasattr(inner, "add") else inner
    values: Any = getattr(message, name)
    if isinstance(values, str):
        setattr(message, name, "x" * number)
    elif hasattr(values, "add"):
        for _ in range(number):
            values.add()
    elif hasattr(values, "update"):
        values.update(dict.fromkeys(range(number), 1.0))
    else:
        values.extend(["x" if name == "stop_strings" else 300] * number)
    return message


@pytest.mark.parametrize(
    ("kind", "path", "field"),
    [
        (GENERATE, "text", "prompt.text"),
        (GENERATE, "token_ids.ids", "prompt.token_ids.ids"),
        (GENERATE, "chat.messages", "prompt.chat.messages"),
        (GENERATE, "chat.messages.content", "prompt.chat.messages"),
        (GENERATE, "sampling.logit_bias", "sampling.logit_bias"),
        (GENERATE, "sampling.allowed_ids", "sampling.allowed_ids"),
        (GENERATE, "sampling.banned_ids", "sampling.banned_ids"),
        (GENERATE, "stopping.stop_strings", "stopping.stop_strings"),
        (GENERATE, "stopping.stop_ids", "stopping.stop_ids"),
        (SCORE, "items", "items"),
        (SCORE, "items.text", "items"),
        (SCORE, "items.context_text", "items"),
        (SCORE, "items.token_ids.ids", "items.token_ids.ids"),
        (SCORE, "items.context_ids.ids", "items.context_ids.ids"),
        (tokenizer_pb2.TokenizeRequest, "text", "text"),
        (tokenizer_pb2.DetokenizeRequest, "token_ids", "token_ids"),
        (tokenizer_pb2.RenderChatRequest, "chat.messages", "chat.messages"),
    ],
)
def test_the_last_entry_passes_and_one_more_is_told_by_its_field(kind: Any, path: str, field: str) -> None:
    for number, expected in ((4, None), (5, field)):
        message = kind()
        with_entries(message, path, number)
        found = told(message)
        assert (None if found is None else found[0]) == expected
        assert found is None or "4" in found[1]


def test_what_is_spread_over_several_items_is_counted_together() -> None:
    message = SCORE(items=[{"token_ids": {"ids": [1, 2]}}] * 2)
    assert told(message) is None
    message.items.add(token_ids={"ids": [3]})
    found = told(message)
    assert found is not None
    assert found[0] == "items.token_ids.ids"


def test_numbers_that_are_not_packed_count_as_those_that_are() -> None:
    for number, passes in ((4, True), (5, False)):
        data = b"\x22" + bytes([2 * number]) + b"\x08\x05" * number
        assert GENERATE.FromString(data).token_ids.ids == [5] * number
        assert (Census(data, BOUNDS).take(GENERATE.DESCRIPTOR) is None) is passes


def test_a_text_without_a_bound_of_its_own_has_the_general_one() -> None:
    assert told(GENERATE(model="x" * MAX_OTHER_BYTES)) is None
    found = told(GENERATE(model="x" * (MAX_OTHER_BYTES + 1)))
    assert found is not None
    assert found[0] == "model"


def test_fields_that_nobody_knows_are_counted_too() -> None:
    for number, passes in ((MAX_FIELDS, True), (MAX_FIELDS + 1, False)):
        assert (Census(b"\xf8\x01\x05" * number, BOUNDS).take(GENERATE.DESCRIPTOR) is None) is passes


@pytest.mark.parametrize("data", [b"\xff" * 20, b"\x22\x7f\x08", b"\x22", b"\x09\x01"])
def test_bytes_that_are_no_message_are_left_to_the_parser(data: bytes) -> None:
    assert Census(data, BOUNDS).take(GENERATE.DESCRIPTOR) is None


def test_the_request_keeps_its_name_when_it_is_refused() -> None:
    message = GENERATE(request_id="mine", stopping={"stop_ids": [1] * 5})
    census = Census(message.SerializeToString(), BOUNDS)
    assert census.take(GENERATE.DESCRIPTOR) is not None
    assert census.request_id == "mine"
