"""The lines of a file of requests: JSON objects with the fields of a request, checked before anything is sent."""

from __future__ import annotations

import difflib
import hashlib
import json
import reprlib
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from serve.client.errors import TesseraError
from serve.client.request import Options, Prompt, Request, generate_message

_PROMPTS: Final = ("prompt", "prompt_ids", "chat")
_KINDS: Final = typing.get_type_hints(Options)
_FIELDS: Final = ("id", *_PROMPTS, *_KINDS)


class BadLine(ValueError):
    """A line of the input or of the output is not what it must be; the message begins with file and line."""

    def __init__(self, path: Path, number: int, what: str) -> None:
        super().__init__(f"{path}:{number}: {what}")


@dataclass(frozen=True, slots=True)
class Line:
    """One request of the file."""

    number: int
    """From 1."""
    id: str | int | None
    """The caller's own name for it."""
    request: Request
    digest: str
    """Digest of prompt and options together, by which an answer is known to be this request's."""

    @property
    def head(self) -> str:
        """How the line of its answer begins, whatever the answer is."""
        named = {"line": self.number, "id": self.id, "request": self.digest}
        return json.dumps(named, ensure_ascii=False).removesuffix("}")


def read_lines(path: Path, defaults: Options) -> Iterator[Line]:
    """The requests of a file, one after the other.

    Args:
        defaults: for what a line does not say; ``null`` in a line takes a default back.

    Raises:
        BadLine: one is no request.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            try:
                yield parse_line(number, raw, defaults)
            except (TypeError, ValueError, TesseraError) as error:
                what = error.message if isinstance(error, TesseraError) else str(error)
                raise BadLine(path, number, what) from error


def check_lines(source: Path, defaults: Options) -> int:
    """How many requests a file holds.

    Raises:
        BadLine: one is none, or has an id that another has.
    """
    seen: dict[str | int, int] = {}
    number = 0
    for line in read_lines(source, defaults):
        number = line.number
        if line.id is not None and (first := seen.setdefault(line.id, number)) != number:
            raise BadLine(source, number, f"line {first} has the id {line.id!r} too")
    return number


def parse_line(number: int, raw: bytes, defaults: Options) -> Line:
    """The request that one line holds.

    Raises:
        TypeError, ValueError, TesseraError: it is none.
    """
    given = _object(raw)
    if unknown := [name for name in given if name not in _FIELDS]:
        near = difflib.get_close_matches(unknown[0], _FIELDS, 1)
        raise ValueError(f"there is no field {unknown[0]!r}" + (f"; the nearest is {near[0]!r}" if near else ""))
    name = given.pop("id", None)
    if not isinstance(name, str | int | None) or isinstance(name, bool):
        raise TypeError(f"id is {reprlib.repr(name)}; it must be a text or a whole number")
    if isinstance(name, str):
        name.encode()  # refuses halves of surrogate pairs, which no file of answers could hold
    prompt = _prompt(given)
    options = cast(Options, {**defaults, **_options(given)})
    generate_message(prompt, options)
    asked = json.dumps([prompt, options], sort_keys=True).encode()
    return Line(number, name, Request(prompt, options), hashlib.sha256(asked).hexdigest()[:16])


def _object(raw: bytes) -> dict[str, Any]:
    if not raw.strip():
        raise ValueError("the line is empty; each must hold one JSON object")
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from error
    try:
        given = json.loads(text, object_pairs_hook=_once, parse_constant=_refuse)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg}, column {error.colno}") from error
    except RecursionError:
        raise ValueError("not JSON of any sense: it is nested too deeply") from None
    if not isinstance(given, dict):
        raise TypeError(f"the line is {reprlib.repr(given)}; it must be a JSON object")
    return given


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the field {next(name for name in names if names.count(name) > 1)!r} is there twice")
    return found


def _refuse(constant: str) -> None:
    raise ValueError(f"not JSON: {constant} is no number of it")


def _prompt(given: dict[str, Any]) -> Prompt:
    """Take the prompt, of whichever kind, out of the fields."""
    there = [name for name in _PROMPTS if given.get(name) is not None]
    if len(there) != 1:
        raise ValueError(f"exactly one of {', '.join(_PROMPTS)} must be given; there {_are(there)}")
    prompts = {name: given.pop(name, None) for name in _PROMPTS}
    kind = there[0]
    prompt = prompts[kind]
    if kind == "prompt":
        if not isinstance(prompt, str):
            raise TypeError(
                f"prompt is {reprlib.repr(prompt)}; it must be a text (prompt_ids takes token ids, chat a conversation)"
            )
    elif not isinstance(prompt, list) or not prompt:
        raise TypeError(f"{kind} is {reprlib.repr(prompt)}; it must be a list that is not empty")
    elif kind == "prompt_ids":
        for place, token_id in enumerate(prompt):
            if not isinstance(token_id, int) or isinstance(token_id, bool):
                raise TypeError(f"prompt_ids[{place}] is {reprlib.repr(token_id)}; it must be a token id")
    else:
        for place, turn in enumerate(prompt):
            if not isinstance(turn, dict) or set(turn) != {"role", "content"}:
                raise TypeError(f"chat[{place}] is {reprlib.repr(turn)}; it must have role and content and nothing else")
    return cast(Prompt, prompt)


def _are(names: list[str]) -> str:
    return f"are {' and '.join(names)}" if names else "is none"


def _options(given: dict[str, Any]) -> dict[str, Any]:
    """Options as Python has them; what protobuf would take silently for something else is refused."""
    for name, value in given.items():
        if value is not None and isinstance(value, bool) != (_KINDS[name] is bool):
            rule = "must be" if _KINDS[name] is bool else "must not be"
            raise TypeError(f"{name} is {reprlib.repr(value)}; it {rule} true or false")
    bias = given.get("logit_bias")
    if isinstance(bias, dict):  # the keys of JSON are texts
        try:
            given["logit_bias"] = {int(token_id): value for token_id, value in bias.items()}
        except ValueError as error:
            raise ValueError(f"logit_bias must have token ids as keys: {error}") from error
    return given
