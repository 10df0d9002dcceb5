"""Lines of requests: every field arrives, and what is wrong is told by file and line before anything is sent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from serve.client import BadLine, Options
from serve.client.offline.lines import Line, read_lines
from serve.client.request import generate_message


def lines_of(folder: Path, *lines: bytes | str | dict[str, Any], **defaults: Any) -> list[Line]:
    file = folder / "in.jsonl"
    encoded = [
        line if isinstance(line, bytes) else (line if isinstance(line, str) else json.dumps(line)).encode() for line in lines
    ]
    file.write_bytes(b"\n".join(encoded) + b"\n")
    return list(read_lines(file, Options(**defaults)))


def test_the_fields_of_a_line_are_those_of_a_request(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "größe"}]
    first, second, third = lines_of(
        tmp_path,
        {"id": "a", "prompt": "x", "temperature": 0.5, "stop_strings": ["END"], "logit_bias": {"7": -2}, "ignore_eos": True},
        {"id": 2, "prompt_ids": [5, 6], "num_sequences": 2, "seed": 3},
        {"chat": chat, "special_tokens": False, "priority": 4},
    )
    message = generate_message(first.request.prompt, first.request.options)
    assert (message.text, message.sampling.temperature, list(message.stopping.stop_strings)) == ("x", 0.5, ["END"])
    assert dict(message.sampling.logit_bias) == {7: -2.0}
    assert message.stopping.ignore_eos
    assert (first.number, first.id, second.number, second.id, third.id) == (1, "a", 2, 2, None)
    assert (second.request.prompt, second.request.options) == ([5, 6], {"num_sequences": 2, "seed": 3})
    assert third.request.prompt == chat


def test_what_a_line_does_not_say_is_the_default_and_null_takes_it_back(tmp_path: Path) -> None:
    plain, own, none = lines_of(
        tmp_path, {"prompt": "x"}, {"prompt": "x", "top_k": 3}, {"prompt": "x", "top_k": None}, top_k=5, seed=1
    )
    messages = [generate_message(line.request.prompt, line.request.options).sampling for line in (plain, own, none)]
    assert [sampling.top_k for sampling in messages] == [5, 3, 0]
    assert not messages[2].HasField("top_k")
    assert {sampling.seed for sampling in messages} == {1}


def test_a_digest_is_that_of_prompt_and_options_and_not_of_their_spelling(tmp_path: Path) -> None:
    lines = lines_of(
        tmp_path,
        {"id": 1, "prompt": "x", "seed": 1, "top_k": 2},
        '{ "top_k":2,  "seed":1, "prompt":"\\u0078" }',
        {"prompt": "x", "seed": 2, "top_k": 2},
        {"prompt": "y", "seed": 1, "top_k": 2},
    )
    digests = [line.digest for line in lines]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "the line is empty"),
        ("nonsense", "not JSON"),
        ('{"prompt": "x", "prompt": "y"}', "'prompt' is there twice"),
        ('{"prompt": "x", "temperature": NaN}', "NaN is no number"),
        ("[" * 100_000, "nested too deeply"),
        (b'{"prompt": "\xff"}', "byte 12 is not UTF-8"),
        ("[1]", "must be a JSON object"),
        ({}, "exactly one of prompt, prompt_ids, chat must be given; there is none"),
        ({"prompt": "x", "chat": [{"role": "user", "content": "x"}]}, "there are prompt and chat"),
        ({"prompt": [1, 2]}, "prompt is [1, 2]; it must be a text"),
        ({"prompt": "\ud800"}, "surrogates not allowed"),
        ({"prompt": "x", "id": "\ud800"}, "surrogates not allowed"),
        ({"prompt_ids": []}, "a list that is not empty"),
        ({"prompt_ids": [1, True]}, "prompt_ids[1] is True"),
        ({"prompt_ids": [1, -1]}, "prompt.token_ids.ids"),
        ({"chat": []}, "a list that is not empty"),
        ({"chat": [{"role": "user", "content": "x", "name": "me"}]}, "chat[0]"),
        ({"chat": [{"role": "user", "content": 1}]}, "messages[0].content is 1; it must be of type str"),
        ({"prompt": "x", "temprature": 1}, "there is no field 'temprature'; the nearest is 'temperature'"),
        ({"prompt": "x", "temperature": "hot"}, "sampling.temperature is 'hot'; it must be of type float"),
        ({"prompt": "x", "temperature": True}, "must not be true or false"),
        ({"prompt": "x", "special_tokens": "no"}, "must be true or false"),
        ({"prompt": "x", "ignore_eos": 1}, "must be true or false"),
        ({"prompt": "x", "top_k": -1}, "sampling.top_k"),
        ({"prompt": "x", "logit_bias": {"the": 1}}, "logit_bias must have token ids as keys"),
        ({"prompt": "x", "id": 1.5}, "id is 1.5"),
    ],
)
def test_what_is_wrong_is_told_by_file_and_line(tmp_path: Path, line: bytes | str | dict[str, Any], words: str) -> None:
    with pytest.raises(BadLine) as told:
        lines_of(tmp_path, {"prompt": "good"}, line)
    assert str(told.value).startswith(f"{tmp_path}/in.jsonl:2: ")
    assert words in str(told.value)
