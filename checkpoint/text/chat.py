"""A chat template: a conversation becomes text. Training and serving both render here, so a model is asked as it was taught.

A template is code from a model's folder. It runs in Jinja's immutable sandbox, sees the conversation and the names of the
special tokens and nothing else, and a request cannot pass it anything further.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError
from jinja2.ext import loopcontrols
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from checkpoint.errors import CheckpointError
from checkpoint.text.tokenizer_files import MAX_TEMPLATE_BYTES, TEMPLATE

_LONGEST_NUMBER_BITS = 1 << 16


class ChatRejected(Exception):
    """The template does not accept this conversation; the message is the template's own, or a general one."""

    def __init__(self, message: str, *, said: str | None = None) -> None:
        super().__init__(message)
        self.said = said
        """The template's own words, if it called ``raise_exception``; else the cause tells, and may quote the conversation."""

    @property
    def reason(self) -> str:
        """What went wrong, for whoever wrote the conversation: it may quote that."""
        return self.said if self.said is not None else str(self.__cause__ or self)


class _RaisedByTemplate(jinja2.TemplateError):
    """A template called ``raise_exception``."""


class ChatTemplate:
    """A compiled template. Rendering changes nothing, so threads may share it."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        file: str = TEMPLATE,
        now: Callable[[], datetime] = datetime.now,
        marks: tuple[str, str] = ("", ""),
    ) -> None:
        """
        Args:
            special_tokens: the named ones, for example ``{"eos_token": "</s>"}``.
            file: where the source is from, for messages.
            now: asked by ``strftime_now``.
            marks: written before and after each part that the template encloses in ``{% generation %}``.

        Raises:
            CheckpointError: the template does not compile.
        """
        self._environment = _environment(now, marks)
        try:
            self._template = self._environment.from_string(source)
        except Exception as error:  # Jinja passes on what Python says of the program it writes: too deep, too long, ...
            line = f"line {error.lineno}: " if isinstance(error, jinja2.TemplateSyntaxError) else ""
            rule = f"{line}the chat template does not compile: {type(error).__name__}: {str(error)[:300]}"
            raise CheckpointError(file, rule) from error
        self._special_tokens = dict(special_tokens)

    @property
    def encloses_answers(self) -> bool:
        """Whether the template encloses something in ``{% generation %}``."""
        return self._environment.encloses_answers

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, max_bytes: int, tools: Any = None
    ) -> str:
        """The text of a conversation.

        Args:
            messages: objects with at least ``role`` and ``content``, oldest first.
            add_generation_prompt: whether the template is to open a turn of the assistant.
            tools: descriptions of tools, for templates that list them.

        Raises:
            ChatRejected: the template refuses the conversation or fails on it, or wrote more than ``max_bytes`` of UTF-8.
        """
        parts: list[str] = []
        num_bytes = 0
        try:
            for part in self._template.generate(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                documents=None,
                **self._special_tokens,
            ):
                parts.append(part)
                num_bytes += len(part.encode())
                if num_bytes > max_bytes:
                    raise ChatRejected(f"the chat template wrote more than {max_bytes} bytes")
        except _RaisedByTemplate as error:
            raise ChatRejected(f"the chat template says: {error}", said=str(error)) from error
        except ChatRejected:
            raise
        except Exception as error:  # a template is a program, which can fail in every way that programs do
            # The error's own words could quote the conversation.
            raise ChatRejected("the chat template cannot render this conversation") from error
        return "".join(parts)


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, and bounds on powers and repetitions: one such expression could take a day, as soon as it compiles."""

    intercepted_binops = frozenset(("*", "**"))
    marks = ("", "")
    encloses_answers = False

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > _LONGEST_NUMBER_BITS:
                raise SecurityError("a number is too large")
        elif operator == "*" and _length(left) * _length(right) > MAX_TEMPLATE_BYTES:
            raise SecurityError("a repetition is too long")
        return super().call_binop(context, operator, left, right)


def _length(factor: object) -> int:
    if isinstance(factor, int):
        return abs(factor)
    return len(factor) if isinstance(factor, str | list | tuple) else 1


def _environment(now: Callable[[], datetime], marks: tuple[str, str]) -> _Environment:
    """What templates written for transformers expect to find."""
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.marks = marks
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's own words for training; a prompt just contains them."""

    tags = {"generation"}  # noqa: RUF012  (declared so by jinja2)
    environment: _Environment

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        self.environment.encloses_answers = True
        begin, end = (
            [jinja2.nodes.Output([jinja2.nodes.TemplateData(mark)], lineno=line)] if mark else []
            for mark in self.environment.marks
        )
        return [*begin, *body, *end]


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own filter escapes HTML, which templates for prompts do not expect.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise _RaisedByTemplate(message)
