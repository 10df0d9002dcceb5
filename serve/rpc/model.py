"""What the handlers know about the served model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from checkpoint.text.chat import ChatTemplate
from checkpoint.text.tokenizer import Tokenizer
from serve.config import ServerConfig
from serve.engine.executor import ModelFacts
from serve.errors import FeatureOff, InvalidRequest, Loading, NotFound
from serve.rpc.threads import in_text_thread
from serve.runtime.edition import Edition
from serve.runtime.gateway import Gateway
from serve.text.tokenizer import exceeds

T = TypeVar("T")

INLINE_CHARACTERS: Final = 4096
"""A text up to this long is tokenised on the event loop: it takes less than the way to a thread and back."""

_ID_BYTES: Final = 8
"""What a token id takes in a sequence of them, or a little more."""

TEXT_TOKENS: Final = 131_072
"""Tokens that the Tokenizer service takes at once, whatever the model's own length."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model, its tokenizer and the configuration, at one moment."""

    facts: ModelFacts
    edition: Edition

    @property
    def config(self) -> ServerConfig:
        return self.edition.config

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.edition.tokenizer

    @property
    def capacity(self) -> int:
        """Positions one sequence can have: what the model allows and the KV cache holds."""
        return min(self.facts.max_model_len, self.facts.num_blocks * self.facts.block_tokens)

    @property
    def max_text_tokens(self) -> int:
        """Tokens that one call of the Tokenizer service may have."""
        return max(self.capacity, TEXT_TOKENS)

    async def in_text_thread(self, work: Callable[[], T], num_bytes: int) -> T:
        """Run ``work`` on a long text of so many bytes; see ``serve.rpc.threads.in_text_thread``. As many wait as requests wait
        for the engine.

        Raises:
            QueueFull: so many texts of the caller wait, or so many bytes.
        """
        limits = self.config.admission
        return await in_text_thread(
            work, num_bytes, most_waiting=limits.max_queued_requests, most_bytes=limits.max_waiting_bytes
        )

    async def encode(
        self, tokenizer: Tokenizer, text: str, *, add_special_tokens: bool, field: str, at_most: int
    ) -> tuple[int, ...]:
        """Token ids, without keeping the event loop from its other calls; see ``encode_now``.

        Raises:
            QueueFull: too many texts of the caller wait.
        """
        if len(text) <= INLINE_CHARACTERS:
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await self.in_text_thread(
            lambda: encode_now(tokenizer, text, add_special_tokens=add_special_tokens, field=field, at_most=at_most),
            sys.getsizeof(text),
        )

    async def decode(self, tokenizer: Tokenizer, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids, without keeping the event loop from its other calls.

        Raises:
            QueueFull: too many texts of the caller wait.
        """
        if len(ids) <= INLINE_CHARACTERS:
            return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return await self.in_text_thread(
            lambda: tokenizer.decode(ids, skip_special_tokens=skip_special_tokens), len(ids) * _ID_BYTES
        )

    def require_name(self, name: str) -> None:
        """
        Raises:
            NotFound: a name was given, and it is not this model's.
        """
        served = self.config.model.served_name
        if name and name != served:
            raise NotFound(f"model {name[:64]!r} is not served here; {served!r} is")

    def require_tokenizer(self, what: str) -> Tokenizer:
        """
        Raises:
            FeatureOff: the model's folder has no tokenizer.
        """
        if self.tokenizer is None:
            raise FeatureOff(f"{what} needs a tokenizer, and this model has none; send and receive token ids")
        return self.tokenizer

    def require_chat(self) -> ChatTemplate:
        """
        Raises:
            FeatureOff: the model has no tokenizer or no chat template.
        """
        tokenizer = self.require_tokenizer("prompt.chat")
        if tokenizer.chat is None:
            raise FeatureOff("prompt.chat needs a chat template, and this model has none; send prompt.text")
        return tokenizer.chat


class Models:
    """Hands out the served model, once there is one."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def current(self) -> ServedModel:
        """
        Raises:
            Loading: the ranks were never ready so far.
        """
        if self._gateway.facts is None:
            raise Loading("the model is being loaded")
        return ServedModel(self._gateway.facts, self._gateway.edition)


def encode_now(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool, field: str, at_most: int) -> tuple[int, ...]:
    """Token ids of a text of any length.

    Raises:
        InvalidRequest: ``field`` has more than ``at_most`` tokens by far. What is only a little too long passes: the caller,
            who knows the limit exactly, counts the ids.
    """
    if exceeds(tokenizer, text, at_most):
        raise InvalidRequest.of(field, f"has more than {at_most} tokens, which is the limit")
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)
