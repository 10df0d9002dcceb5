"""The model folder's chat template: a conversation becomes a prompt.

A template is code from the folder. It runs in Jinja's immutable sandbox, sees the conversation and the names of the special
tokens and nothing else, and a request cannot pass it anything further.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError
from jinja2.ext import loopcontrols
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from checkpoint.errors import CheckpointError
from checkpoint.folder import Folder
from checkpoint.tokenizer_files import MAX_TEMPLATE_BYTES, default_template
from serve.errors import ConfigError

_LONGEST_NUMBER_BITS = 1 << 16


class ChatRejected(Exception):
    """The template does not accept this conversation; the message is the template's own, or a general one."""


class _RaisedByTemplate(jinja2.TemplateError):
    """A template called ``raise_exception``."""


class ChatTemplate:
    """A compiled template. Rendering changes nothing, so threads may share it."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        """
        Raises:
            ConfigError: the template does not compile.
        """
        try:
            self._template = _environment().from_string(source)
        except Exception as error:  # Jinja passes on what Python says of the program it writes: too deep, too long, ...
            raise ConfigError(f"the chat template does not compile: {type(error).__name__}: {str(error)[:300]}") from error
        self._special_tokens = special_tokens

    def render(self, messages: Sequence[tuple[str, str]], *, add_generation_prompt: bool, max_bytes: int) -> str:
        """The prompt for ``messages``, pairs of role and content, oldest first.

        Raises:
            ChatRejected: the template refuses the conversation or fails on it, or wrote more than ``max_bytes`` of UTF-8.
        """
        turns = [{"role": role, "content": content} for role, content in messages]
        parts: list[str] = []
        num_bytes = 0
        try:
            for part in self._template.generate(
                messages=turns, add_generation_prompt=add_generation_prompt, tools=None, documents=None, **self._special_tokens
            ):
                parts.append(part)
                num_bytes += len(part.encode())
                if num_bytes > max_bytes:
                    raise ChatRejected(f"the chat template wrote more than {max_bytes} bytes")
        except _RaisedByTemplate as error:
            raise ChatRejected(f"the chat template says: {error}") from error
        except ChatRejected:
            raise
        except Exception as error:  # a template is a program, which can fail in every way that programs do
            # The error's own words could quote the conversation.
            raise ChatRejected("the chat template cannot render this conversation") from error
        return "".join(parts)


def load_chat_template(folder: Folder, config: dict[str, Any], special_tokens: dict[str, str]) -> ChatTemplate | None:
    """The folder's default template, or ``None``: ``chat_template.jinja`` goes before the entry in ``tokenizer_config.json``.

    Raises:
        CheckpointError: it cannot be read, does not compile or has the wrong type.
    """
    found = default_template(folder, config)
    if found is None:
        return None
    source, file = found
    try:
        return ChatTemplate(source, special_tokens)
    except ConfigError as error:
        raise CheckpointError(file, str(error)) from error


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, and bounds on powers and repetitions: one such expression could take a day, as soon as it compiles."""

    intercepted_binops = frozenset(("*", "**"))

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


def _environment() -> ImmutableSandboxedEnvironment:
    """What templates written for transformers expect to find."""
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's own words for training; a prompt just contains them."""

    tags = {"generation"}  # noqa: RUF012  (declared so by jinja2)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own filter escapes HTML, which templates for prompts do not expect.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise _RaisedByTemplate(message)
