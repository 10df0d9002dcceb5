"""Completions by a checkpoint, in batches, through transformers' own generation. One process, no DeepSpeed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from transformers import GenerationConfig, PreTrainedModel

from checkpoint import CheckpointError
from checkpoint.given import NOTHING_GIVEN, Given
from checkpoint.text.chat import ChatRejected
from finetune.data.tokenizer import open_tokenizer
from finetune.errors import DataError
from finetune.machine.quiet import quiet
from finetune.trained.open import open_trained

_MOST_PROMPT_BYTES = 4 << 20
"""A rendered chat may have so many bytes, as with a server unless it is told otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How each next token is chosen."""

    max_new_tokens: int = 64
    temperature: float = 0.0
    """0 takes the likeliest token."""
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One record of a prompt file: a text, or the messages of a chat."""

    text: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    place: str = ""
    """``file, line N``."""

    @property
    def shown(self) -> str:
        """The text, or the last message's."""
        if self.text is not None:
            return self.text
        assert self.messages, "a prompt has one of the two"
        return str(self.messages[-1]["content"])


class _Generates(Protocol):
    """A causal model, which transformers' types do not tell from any other."""

    def generate(
        self, ids: torch.Tensor, *, attention_mask: torch.Tensor, generation_config: GenerationConfig
    ) -> torch.Tensor: ...


class Completer:
    """A checkpoint that completes prompts.

    Args:
        path: a checkpoint, a folder of checkpoints (the latest counts), or a run's folder.
        device: ``cpu`` or ``cuda``.
        given: what the checkpoint's files leave open.

    Raises:
        ConfigError: the checkpoint or its tokenizer is at fault.
    """

    def __init__(
        self, path: Path, *, device: str = "cpu", dtype: torch.dtype = torch.float32, given: Given = NOTHING_GIVEN
    ) -> None:
        trained = open_trained(path, dtype, given)
        self.folder = trained.folder
        self._tokenizer = open_tokenizer(trained.tokenizer_folder)
        self._model: PreTrainedModel = trained.model.to(device)  # type: ignore[arg-type]  # wrapped: mypy takes it for no method
        self._defaults = trained.generation_config
        self._model.config.use_cache = True
        self._longest = int(getattr(self._model.config, "max_position_embeddings", 0) or 1 << 30)

    def complete(self, prompts: Sequence[Prompt], sampling: Sampling, *, batch: int = 8) -> Iterator[str]:
        """Yield one completion a prompt, in order.

        A prompt that leaves no room in the model's longest position loses its beginning.

        Raises:
            DataError: a chat without a chat template, or a prompt without a token.
        """
        for first in range(0, len(prompts), batch):
            # One seed a batch: what one prompt yields does not depend on the batches before it.
            torch.manual_seed(sampling.seed + first)
            yield from self._batch([self._ids(prompt, sampling) for prompt in prompts[first : first + batch]], sampling)

    def _ids(self, prompt: Prompt, sampling: Sampling) -> list[int]:
        """What a server makes of the prompt: a text gets the tokenizer's special tokens, a template writes its own."""
        if prompt.text is not None:
            ids = list(self._tokenizer.encode(prompt.text))
        else:
            ids = list(self._tokenizer.encode(self._render(prompt), add_special_tokens=False))
        if not ids:
            start = self._defaults.get("bos_token_id", self._end_id)
            if start is None:
                raise DataError(f"{prompt.place}: the prompt has no token, and the model no token to begin with")
            ids = [int(start)]
        room = max(1, self._longest - sampling.max_new_tokens)
        return ids[-room:]

    def _render(self, prompt: Prompt) -> str:
        try:
            if (template := self._tokenizer.chat) is not None:
                return template.render(prompt.messages or (), add_generation_prompt=True, max_bytes=_MOST_PROMPT_BYTES)
            reason = "there is none"
        except ChatRejected as error:
            reason = error.reason
        except CheckpointError as error:
            reason = str(error)
        reason = " ".join(reason.split())[:200]
        raise DataError(f"{prompt.place}: the chat template of {self.folder} cannot render these messages: {reason}")

    @property
    def _end_id(self) -> int | None:
        found: int | list[int] | None = self._defaults.get("eos_token_id", self._tokenizer.end_of_text_id)
        return found[0] if isinstance(found, list) else found

    @torch.inference_mode()
    def _batch(self, rows: list[list[int]], sampling: Sampling) -> list[str]:
        width = max(map(len, rows))
        filler = self._end_id or 0
        device = self._model.device
        ids = torch.tensor([[filler] * (width - len(row)) + row for row in rows], device=device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
        sampled: dict[str, Any] = {"do_sample": False}
        if sampling.temperature > 0:
            sampled = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
        ends = self._defaults.get("eos_token_id", self._tokenizer.end_of_text_id)
        new_tokens = max(1, min(sampling.max_new_tokens, self._longest - width))
        settings = GenerationConfig(  # type: ignore[no-untyped-call]  # transformers leaves it unannotated
            max_new_tokens=new_tokens, eos_token_id=ends, pad_token_id=filler, **sampled
        )
        with quiet():
            made = cast(_Generates, self._model).generate(ids, attention_mask=mask, generation_config=settings)
        return [self._tokenizer.decode(row) for row in made[:, width:].tolist()]


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a file: JSON objects with ``prompt``, ``text`` or ``messages`` if its name ends in .jsonl, else its lines.

    Raises:
        DataError: names the file and line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--prompts: {path}: cannot be read: {error}") from error
    read = _record if path.suffix == ".jsonl" else _line
    prompts = [read(line, f"{path}, line {number}") for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not prompts:
        raise DataError(f"--prompts: {path}: holds no prompt; it must have one a line")
    return prompts


def _line(line: str, place: str) -> Prompt:
    return Prompt(text=line.rstrip("\r"), place=place)


def _record(line: str, place: str) -> Prompt:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{place}: not valid JSON: {error.msg} at column {error.colno}") from error
    rule = "must be an object with one of the keys prompt, text, messages"
    if not isinstance(record, dict):
        raise DataError(f"{place}: is a {type(record).__name__}; it {rule}")
    given = [key for key in ("prompt", "text", "messages") if key in record]
    if len(given) != 1:
        raise DataError(f"{place}: has {', '.join(given) or 'none of them'}; it {rule}")
    value = record[given[0]]
    if given[0] != "messages":
        if not isinstance(value, str):
            raise DataError(f"{place}: {given[0]} is a {type(value).__name__}; it must be text")
        return Prompt(text=value, place=place)
    if not isinstance(value, list) or not value:
        raise DataError(f"{place}: messages must be a list of at least one message")
    for message in value:
        known = isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
        if not known:
            raise DataError(f"{place}: every message must be an object with the texts role and content")
    return Prompt(messages=tuple(value), place=place)
