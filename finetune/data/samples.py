"""Shapes of records: text, prompt and completion, Alpaca, ShareGPT, messages. What is wrong with one is said with a remedy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT_ROLES: Final[Mapping[str, str]] = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "function_response": "tool",
    "observation": "tool",
}


class Malformed(Exception):
    """A record is not of its shape; the message says how, and what to do. The caller adds the place."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Where the fields of a record are found."""

    text: str = "text"
    prompt: str = "prompt"
    completion: str = "completion"
    messages: str | None = None


@dataclass(frozen=True, slots=True)
class Text:
    """A document: every token is a target."""

    text: str


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt and what is to follow it."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Chat:
    """Turns of a conversation, as the chat template gets them."""

    messages: tuple[Mapping[str, Any], ...]
    weights: tuple[bool, ...]
    """Whether each turn may be a target: false where the record gives it ``weight: 0``."""
    tools: Any = None


Sample = Text | Completion | Chat


def detect(record: Mapping[str, Any], keys: Keys) -> str:
    """The format of a record by its keys.

    Raises:
        Malformed: no format has these keys.
    """
    turns = record.get(_messages_key(record, keys))
    if isinstance(turns, list):
        return "sharegpt" if turns and isinstance(turns[0], dict) and "from" in turns[0] else "messages"
    if "instruction" in record and "output" in record:
        return "alpaca"
    if keys.prompt in record and keys.completion in record:
        return "completion"
    if keys.text in record:
        return "text"
    expected = (
        f"{keys.text!r}; {keys.prompt!r} and {keys.completion!r}; 'instruction' and 'output'; 'messages' or 'conversations'"
    )
    raise Malformed(
        f"has none of the known sets of keys ({expected}); its keys are {_names(record)}; "
        "name yours by data.text_key, data.prompt_key and data.completion_key, or data.messages_key"
    )


def parse(record: Mapping[str, Any], format: str, keys: Keys) -> Sample:
    """Read a record of ``format``.

    Raises:
        Malformed: it has another shape.
    """
    if format == "text":
        return Text(_text(record, keys.text, "data.text_key"))
    if format == "alpaca":
        return _alpaca(record)
    if format == "completion":
        return _completion(record, keys)
    return _chat(record, format, keys)


def texts_of(sample: Sample) -> Iterator[str]:
    """All that a sample says, without the template's words: what a tokenizer is learned from."""
    if isinstance(sample, Text):
        yield sample.text
    elif isinstance(sample, Completion):
        yield sample.prompt + sample.completion
    else:
        for message in sample.messages:
            yield message["content"]


def _completion(record: Mapping[str, Any], keys: Keys) -> Sample:
    prompt, completion = record.get(keys.prompt), record.get(keys.completion)
    if isinstance(prompt, list) and isinstance(completion, list):  # both as turns
        asked, answered = _turns(prompt, keys.prompt, {}), _turns(completion, keys.completion, {})
        messages = tuple(message for message, _ in asked + answered)
        return Chat(messages, (False,) * len(asked) + tuple(weight for _, weight in answered))
    return Completion(
        _text(record, keys.prompt, "data.prompt_key"), _text(record, keys.completion, "data.completion_key", full=True)
    )


def _alpaca(record: Mapping[str, Any]) -> Chat:
    asked = _text(record, "instruction", full=True)
    if record.get("input"):
        asked += "\n\n" + _text(record, "input")
    messages = []
    if record.get("system"):
        messages.append({"role": "system", "content": _text(record, "system")})
    messages.append({"role": "user", "content": asked})
    messages.append({"role": "assistant", "content": _text(record, "output", full=True)})
    return Chat(tuple(messages), (True,) * len(messages))


def _messages_key(record: Mapping[str, Any], keys: Keys) -> str:
    return keys.messages or ("conversations" if "messages" not in record and "conversations" in record else "messages")


def _chat(record: Mapping[str, Any], format: str, keys: Keys) -> Chat:
    key = _messages_key(record, keys)
    if key not in record:
        raise Malformed(f"has no key {key!r} (data.messages_key); its keys are {_names(record)}")
    names = {"role": "from", "content": "value"} if format == "sharegpt" else {}
    turns = _turns(record[key], key, names)
    if format == "sharegpt" and isinstance(record.get("system"), str) and record["system"] and turns[0][0]["role"] != "system":
        turns.insert(0, ({"role": "system", "content": _text(record, "system")}, True))
    return Chat(tuple(message for message, _ in turns), tuple(weight for _, weight in turns), _tools(record))


def _tools(record: Mapping[str, Any]) -> Any:
    tools = record.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise Malformed(f"'tools' must be a list of tool descriptions; it is {type(tools).__name__}")
    return tools or None


def _turns(turns: Any, key: str, names: Mapping[str, str]) -> list[tuple[dict[str, Any], bool]]:
    if not isinstance(turns, list) or not turns:
        what = "empty" if turns == [] else type(turns).__name__
        raise Malformed(f"{key!r} must be a list of turns; it is {what}")
    return [_turn(turn, f"turn {number}", names) for number, turn in enumerate(turns, 1)]


def _turn(turn: Any, where: str, names: Mapping[str, str]) -> tuple[dict[str, Any], bool]:
    role_key, content_key = names.get("role", "role"), names.get("content", "content")
    if not isinstance(turn, dict):
        raise Malformed(f"{where}: must be an object of {role_key!r} and {content_key!r}; it is {type(turn).__name__}")
    if role_key not in turn:
        raise Malformed(f"{where}: has no {role_key!r}; its keys are {_names(turn)}")
    role = turn[role_key]
    known: Mapping[str, str] = _SHAREGPT_ROLES if names else {name: name for name in ROLES}
    if not isinstance(role, str) or role not in known:
        raise Malformed(f"{where}: {role_key} is {role!r}; it must be one of {', '.join(known)}")
    weight = turn.get("weight")
    if weight not in (None, 0, 1):
        raise Malformed(f"{where}: 'weight' is {weight!r}; it must be 0 (no target) or 1")
    content = turn.get(content_key)
    if content is None and turn.get("tool_calls"):
        content = ""
    if isinstance(content, list):
        content = _joined(content, where, content_key)
    if not isinstance(content, str):
        raise Malformed(f"{where}: {content_key!r} must be text; it is {type(content).__name__}")
    _check_characters(content, f"{where}: {content_key!r}")
    # A table fills absent keys with null; templates ask whether a key is there.
    more = {name: value for name, value in turn.items() if value is not None and name not in (role_key, content_key, "weight")}
    return {"role": known[role], "content": content, **more}, weight != 0


def _joined(parts: list[Any], where: str, key: str) -> str:
    texts = []
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise Malformed(f"{where}: {key!r} holds a part that is not text; only text can be trained on: leave it out")
        texts.append(part["text"])
    return "".join(texts)


def _text(record: Mapping[str, Any], key: str, option: str | None = None, *, full: bool = False) -> str:
    named = f" ({option})" if option else ""
    if key not in record:
        raise Malformed(f"has no key {key!r}{named}; its keys are {_names(record)}")
    text = record[key]
    if not isinstance(text, str):
        raise Malformed(f"{key!r} must be text; it is {type(text).__name__}")
    if full and not text:
        raise Malformed(f"{key!r} is empty; fill it in or leave the record out")
    _check_characters(text, repr(key))
    return text


def _check_characters(text: str, what: str) -> None:
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise Malformed(f"{what} holds half a surrogate pair, which is not a character; write the whole character") from None


def _names(record: Mapping[str, Any]) -> str:
    return ", ".join(sorted(map(str, record))) or "none"
