"""The model folder's chat template: a conversation becomes a prompt.

A template is code from the folder. It runs in Jinja's immutable sandbox, sees the conversation and the names of the special
tokens and nothing else, and a request cannot pass it anything further.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from serve.errors import ConfigError


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
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template does not compile: {error}") from error
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
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
            # The error's own words could quote the conversation.
            raise ChatRejected("the chat template cannot render this conversation") from error
        return "".join(parts)


def load_chat_template(folder: Path, config: dict[str, Any], special_tokens: dict[str, str]) -> ChatTemplate | None:
    """The folder's default template, or ``None``: ``chat_template.jinja`` goes before the entry in ``tokenizer_config.json``.

    Raises:
        ConfigError: it does not compile or has the wrong type.
    """
    file = folder / "chat_template.jinja"
    source = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
    if isinstance(source, list):
        source = next((entry.get("template") for entry in source if entry.get("name") == "default"), None)
    if isinstance(source, dict):
        source = source.get("default")
    if source is None:
        return None
    if not isinstance(source, str):
        raise ConfigError(f"chat_template in {folder / 'tokenizer_config.json'} is {type(source).__name__}; a text is expected")
    return ChatTemplate(source, special_tokens)


def _environment() -> ImmutableSandboxedEnvironment:
    """What templates written for transformers expect to find."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
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
