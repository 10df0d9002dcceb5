"""A record's shape is known by its keys, and a record that is not of its shape says how."""

from __future__ import annotations

from typing import Any

import pytest

from finetune.data.samples import Chat, Completion, Keys, Malformed, Text, detect, parse

USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    ("record", "format", "sample"),
    [
        ({"text": "x", "id": 1}, "text", Text("x")),
        ({"prompt": "q", "completion": "a"}, "completion", Completion("q", "a")),
        ({"prompt": "", "completion": "a"}, "completion", Completion("", "a")),
        ({"prompt": [USER], "completion": [ANSWER]}, "completion", Chat((USER, ANSWER), (False, True))),
        ({"instruction": "q", "input": "", "output": "a"}, "alpaca", Chat((USER, ANSWER), (True, True))),
        (
            {"instruction": "q", "input": "i", "output": "a"},
            "alpaca",
            Chat(({"role": "user", "content": "q\n\ni"}, ANSWER), (True, True)),
        ),
        (
            {"system": "s", "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
            "sharegpt",
            Chat(({"role": "system", "content": "s"}, USER, ANSWER), (True, True, True)),
        ),
        ({"messages": [USER, ANSWER]}, "messages", Chat((USER, ANSWER), (True, True))),
        ({"conversations": [USER, ANSWER]}, "messages", Chat((USER, ANSWER), (True, True))),
        ({"messages": [USER, {**ANSWER, "weight": 0}]}, "messages", Chat((USER, ANSWER), (True, False))),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, {**ANSWER, "name": None}]},
            "messages",
            Chat((USER, ANSWER), (True, True)),
        ),
    ],
)
def test_records_are_known_by_their_keys(record: dict[str, Any], format: str, sample: object) -> None:
    assert detect(record, Keys()) == format
    assert parse(record, format, Keys()) == sample


def test_keys_can_be_named() -> None:
    keys = Keys(prompt="question", completion="answer", messages="dialog")
    assert parse({"question": "q", "answer": "a"}, detect({"question": "q", "answer": "a"}, keys), keys) == Completion("q", "a")
    assert detect({"dialog": [USER, ANSWER]}, keys) == "messages"


@pytest.mark.parametrize(
    ("record", "format", "says"),
    [
        ({"messages": [{"role": "usr", "content": "q"}]}, "messages", "turn 1: role is 'usr'; it must be one of system"),
        ({"messages": [USER, {"role": "assistant"}]}, "messages", "turn 2: 'content' must be text; it is NoneType"),
        ({"messages": [USER, "hello"]}, "messages", "turn 2: must be an object"),
        ({"messages": [{"content": "q"}]}, "messages", "turn 1: has no 'role'; its keys are content"),
        ({"messages": []}, "messages", "must be a list of turns; it is empty"),
        ({"messages": "hello"}, "messages", "must be a list of turns; it is str"),
        ({"messages": [{**USER, "weight": 2}]}, "messages", "'weight' is 2; it must be 0"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages", "a part that is not text"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages", "surrogate"),
        ({"messages": [USER], "tools": "x"}, "messages", "'tools' must be a list"),
        ({"conversations": [{"from": "bot", "value": "q"}]}, "sharegpt", "from is 'bot'; it must be one of human"),
        ({"instruction": "", "output": "a"}, "alpaca", "'instruction' is empty"),
        ({"instruction": "q", "output": None}, "alpaca", "'output' must be text; it is NoneType"),
        ({"prompt": "q"}, "completion", "has no key 'completion' (data.completion_key)"),
        ({"prompt": "q", "completion": ""}, "completion", "'completion' is empty"),
        ({"id": 1}, "messages", "has no key 'messages' (data.messages_key); its keys are id"),
    ],
)
def test_a_record_of_another_shape_says_how(record: dict[str, Any], format: str, says: str) -> None:
    with pytest.raises(Malformed) as caught:
        parse(record, format, Keys())
    assert says in str(caught.value)


def test_unknown_keys_are_refused_with_the_known_ones() -> None:
    with pytest.raises(Malformed, match=r"its keys are body, id; name yours by data\.text_key"):
        detect({"id": 1, "body": "x"}, Keys())
