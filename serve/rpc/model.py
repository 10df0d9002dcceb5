"""What the handlers know about the served model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeVar

from serve.config import ServerConfig
from serve.engine.executor import ModelFacts
from serve.errors import FeatureOff, NotFound
from serve.runtime.edition import Edition
from serve.text.chat import ChatTemplate
from serve.text.tokenizer import Tokenizer

T = TypeVar("T")

INLINE_CHARACTERS: Final = 4096
"""A text up to this long is tokenised on the event loop: it takes less than the way to a thread and back."""

_text_threads: Final = ThreadPoolExecutor(max_workers=2, thread_name_prefix="text")
"""Few, so that a flood of long texts does not take the cores from the ranks."""


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


async def encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
    """Token ids, without keeping the event loop from its other calls."""
    if len(text) <= INLINE_CHARACTERS:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return await in_text_thread(lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens))


async def decode(tokenizer: Tokenizer, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
    """Text of the ids, likewise."""
    if len(ids) <= INLINE_CHARACTERS:
        return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
    return await in_text_thread(lambda: tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))


async def in_text_thread(work: Callable[[], T]) -> T:
    """Run ``work`` in one of the few threads for long texts."""
    return await asyncio.get_running_loop().run_in_executor(_text_threads, work)
