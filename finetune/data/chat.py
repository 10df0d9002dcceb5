"""Conversations as text: the chat template rendered as transformers renders it, and where in the text each turn lies.

A template is code from a model's folder. It runs in Jinja's immutable sandbox and sees the conversation and the names of the
special tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from finetune.data.samples import Chat, Malformed
from finetune.data.templates import TEMPLATES
from finetune.errors import ConfigError

_BEGIN, _END = "\ufdd0", "\ufdd1"  # no characters of any text: the ends of what {% generation %} encloses
_PLACE = "\ufdd2"  # nor this: stands for the content of a turn
_NO_SPANS = (
    "the chat template writes turn {turn} differently once more turns follow, so its tokens cannot be told apart; "
    "enclose the assistant's words in {{% generation %}} … {{% endgeneration %}} in the template (data.chat_template)"
)


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text, and the half-open ranges of characters that are targets."""

    text: str
    spans: tuple[tuple[int, int], ...]
    ends_with_turn: bool
    """Whether the last range ends the text, but for white space: then the end of text is to be learned after it."""


class _RaisedByTemplate(jinja2.TemplateError):
    """A template called ``raise_exception``."""


class _Generation(Extension):
    """``{% generation %}``: what it encloses is the assistant's."""

    tags = {"generation"}  # noqa: RUF012  (declared so by jinja2)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (jinja2.nodes.Output([jinja2.nodes.TemplateData(mark)], lineno=line) for mark in (_BEGIN, _END))
        return [begin, *body, end]


class ChatTemplate:
    """A compiled template with the special tokens of its tokenizer."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], specials: Iterable[str], now: datetime, place: str
    ) -> None:
        """
        Args:
            special_tokens: the named ones, which the template sees.
            specials: all special tokens, any of which may end a turn.
            now: what ``strftime_now`` tells, so that data prepared in several goes says one date.
            place: file the template is from, for messages.

        Raises:
            ConfigError: it does not compile.
        """
        self._environment = _environment(now)
        try:
            self._template = self._environment.from_string(source)
        except jinja2.TemplateError as error:
            line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise ConfigError(f"{place}{line}: the chat template does not compile: {error}") from error
        nodes = self._environment.parse(source)
        self._marks = any(data.data == _BEGIN for data in nodes.find_all(jinja2.nodes.TemplateData))
        self._special_tokens = dict(special_tokens)
        self._specials = tuple({*specials, *special_tokens.values()} - {""})

    def render(self, chat: Chat, wanted: Sequence[bool]) -> Rendered:
        """A whole conversation, and the ranges of the turns for which ``wanted`` is true.

        Raises:
            Malformed: the template refuses the conversation, or its turns cannot be told apart.
        """
        text, marks = _without_marks(self._text(chat, len(chat.messages)))
        wanted = [want and weight for want, weight in zip(wanted, chat.weights, strict=True)]
        spans = self._marked(chat, wanted, text, marks) if self._marks else self._found(chat, wanted, text)
        spans = [self._trimmed(text, begin, end) for begin, end in spans if begin < end]
        ends = bool(spans) and not text[spans[-1][1] :].strip()
        return Rendered(text, tuple(spans), ends)

    def render_whole(self, chat: Chat) -> str:
        """A whole conversation.

        Raises:
            Malformed: the template refuses it.
        """
        return _without_marks(self._text(chat, len(chat.messages)))[0]

    def ends_by_itself(self, text: str) -> bool:
        """Whether ``text`` ends with a special token."""
        return text.rstrip().endswith(self._specials)

    # -- ranges

    def _marked(self, chat: Chat, wanted: Sequence[bool], text: str, marks: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """What the template itself marks; each mark is a turn of the assistant, in order."""
        turns = [index for index, message in enumerate(chat.messages) if message["role"] == "assistant"]
        if len(marks) != len(turns):
            if all(wanted[index] for index in turns):
                return [self._with_end(text, *mark) for mark in marks]
            raise Malformed(
                f"the chat template marks {len(marks)} parts by {{% generation %}} for {len(turns)} turns of the assistant, so "
                "single turns cannot be chosen; set data.train_on to completion and give no 'weight'"
            )
        return [self._with_end(text, *mark) for turn, mark in zip(turns, marks, strict=True) if wanted[turn]]

    def _with_end(self, text: str, begin: int, end: int) -> tuple[int, int]:
        """With the special token that follows at once, when the mark ends before it: the end of a turn is to be learned."""
        if not self.ends_by_itself(text[begin:end]):
            following = text[end:].lstrip()
            for special in sorted(self._specials, key=len, reverse=True):
                if following.startswith(special):
                    return begin, len(text) - len(following) + len(special)
        return begin, end

    def _found(self, chat: Chat, wanted: Sequence[bool], text: str) -> list[tuple[int, int]]:
        """Ranges of turns, found by rendering the conversation up to each of them."""
        return [self._range(chat, turn, text) for turn, want in enumerate(wanted) if want]

    def _range(self, chat: Chat, turn: int, text: str) -> tuple[int, int]:
        """From the end of the prompt before the turn to the end of what the template writes with it."""
        message = chat.messages[turn]
        before = self._text_before(chat, turn, prompt=message["role"] == "assistant")
        until = text if turn == len(chat.messages) - 1 else self._text(chat, turn + 1)
        if message["role"] == "assistant" and text.startswith(before) and text.startswith(until):
            return len(before), len(until)
        # The template writes this turn in another way when it is the last, or in a prompt. A mark in its place shows where.
        head, tail = self._around(chat, turn, len(chat.messages))
        _, ending = self._around(chat, turn, turn + 1)
        end = len(text) - len(tail)
        if not (text.startswith(head) and text.endswith(tail) and end >= len(head)):
            raise Malformed(_NO_SPANS.format(turn=turn + 1))
        prompted = message["role"] == "assistant" and text.startswith(before) and len(before) <= len(head)
        begin = len(before) if prompted else len(head)
        return begin, end + self._shared_ending(ending, tail)

    def _shared_ending(self, ending: str, tail: str) -> int:
        """How many characters end the turn both last and in the middle; whole lines and special tokens, not parts of them."""
        shared = _common_prefix(ending, tail)
        if shared == len(ending):
            return shared
        kept = ending[:shared]
        specials = (kept.rfind(special) + len(special) for special in self._specials if special in kept)
        return max(kept.rfind("\n") + 1, *specials, 0)

    def _around(self, chat: Chat, turn: int, turns: int) -> tuple[str, str]:
        """What the template writes before and after the content of a turn, in the first ``turns`` turns."""
        messages = list(chat.messages)
        messages[turn] = {**messages[turn], "content": _PLACE}
        text = _without_marks(self._text(Chat(tuple(messages), chat.weights, chat.tools), turns))[0]
        if text.count(_PLACE) != 1:
            raise Malformed(_NO_SPANS.format(turn=turn + 1))
        head, tail = text.split(_PLACE)
        return head, tail

    def _trimmed(self, text: str, begin: int, end: int) -> tuple[int, int]:
        """Without the white space after the special token that ends the turn: nobody ever waits for it."""
        kept = text[begin:end].rstrip()
        return (begin, begin + len(kept)) if self.ends_by_itself(kept) else (begin, end)

    # -- rendering

    def _text_before(self, chat: Chat, turn: int, *, prompt: bool) -> str:
        """What a prompt for this turn looks like; empty where the template has nothing to say without a turn."""
        if turn == 0 and not prompt:
            return ""
        try:
            return self._text(chat, turn, prompt=prompt)
        except Malformed:
            if turn == 0:
                return ""
            raise

    def _text(self, chat: Chat, turns: int, *, prompt: bool = False) -> str:
        try:
            rendered = self._template.render(
                messages=[dict(message) for message in chat.messages[:turns]],
                tools=chat.tools,
                documents=None,
                add_generation_prompt=prompt,
                **self._special_tokens,
            )
        except _RaisedByTemplate as error:
            raise Malformed(f"the chat template refuses the conversation: {error}; mend the record or the template") from error
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise Malformed(f"the chat template fails on the conversation: {error}; mend the record or the template") from error
        return _without_marks(rendered)[0] if prompt or turns < len(chat.messages) else rendered


def _common_prefix(first: str, second: str) -> int:
    if second.startswith(first):
        return len(first)
    return next((index for index, (one, other) in enumerate(zip(first, second, strict=False)) if one != other), len(second))


def _without_marks(text: str) -> tuple[str, list[tuple[int, int]]]:
    """The text without the marks, and the ranges they enclosed."""
    if _BEGIN not in text and _END not in text:
        return text, []
    kept: list[str] = []
    ranges: list[tuple[int, int]] = []
    length, begin = 0, None
    for index, part in enumerate(text.replace(_END, _BEGIN).split(_BEGIN)):
        if index % 2:
            begin = length
        elif begin is not None:
            ranges.append((begin, length))
        kept.append(part)
        length += len(part)
    return "".join(kept), ranges


def find_template(named: str | None, tokenizer_folder: Path) -> tuple[str, str] | None:
    """The template of a run and where it is from: the one named, or the tokenizer's own.

    Raises:
        ConfigError: the file cannot be read, or what the tokenizer's folder says is none.
    """
    if named is not None:
        if named in TEMPLATES:
            return TEMPLATES[named], f"data.chat_template {named}"
        path = Path(named).expanduser()
        try:
            return path.read_text(encoding="utf-8-sig"), str(path)
        except (OSError, UnicodeDecodeError) as error:
            names = ", ".join(TEMPLATES)
            raise ConfigError(
                f"data.chat_template: {path} cannot be read: {error}; name a Jinja file or one of {names}"
            ) from error
    file = tokenizer_folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8"), str(file)
    file = tokenizer_folder / "tokenizer_config.json"
    source = json.loads(file.read_text(encoding="utf-8")).get("chat_template") if file.is_file() else None
    if isinstance(source, list):
        source = next((entry.get("template") for entry in source if entry.get("name") == "default"), None)
    if source is not None and not isinstance(source, str):
        raise ConfigError(
            f"{file}: chat_template is {type(source).__name__}; it must be text; or name one by data.chat_template"
        )
    return (source, str(file)) if source is not None else None


def special_tokens_of(folder: Path, end_of_text: str) -> dict[str, str]:
    """Named special tokens of a tokenizer's folder, such as ``{"eos_token": "</s>"}``, as templates expect them."""
    named: dict[str, str] = {"eos_token": end_of_text}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        if not (folder / file).is_file():
            continue
        for key, value in json.loads((folder / file).read_text(encoding="utf-8")).items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and not key.startswith("add_") and isinstance(text, str):
                named[key] = text
    return named


def _environment(now: datetime) -> ImmutableSandboxedEnvironment:
    """What templates written for transformers expect to find."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = now.strftime
    return environment


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own filter escapes HTML, which templates for prompts do not expect.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise _RaisedByTemplate(message)
