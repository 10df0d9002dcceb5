"""The few calls of transformers that it leaves without types, with theirs, for the benchmarks that measure beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.utils import logging


class Generates(Protocol):
    """What is called of a model that transformers generates with: its own types of ``generate`` fit no model of its own."""

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        ...

    def generate(self, inputs: Tensor, **options: Any) -> Tensor | GenerateDecoderOnlyOutput:
        """Prompts of one length and what comes after them: ids, or more than these with ``return_dict_in_generate``."""
        ...

    def generate_batch(
        self,
        inputs: list[list[int]],
        generation_config: GenerationConfig,
        continuous_batching_config: ContinuousBatchingConfig | None,
        *,
        progress_bar: bool,
    ) -> Mapping[str, Answer]:
        """What comes after each prompt, by continuous batching; the prompts may differ in length."""
        ...


class Answer(Protocol):
    """What continuous batching says to one prompt."""

    generated_tokens: Sequence[int]


class _Talk(Protocol):
    """What is called of ``transformers.utils.logging``."""

    def set_verbosity_error(self) -> None: ...

    def disable_progress_bar(self) -> None: ...


_TALK: Final[_Talk] = logging


def without_progress_bars() -> None:
    """Have transformers draw none in this process."""
    _TALK.disable_progress_bar()


def without_advice() -> None:
    """Have transformers log errors alone in this process."""
    _TALK.set_verbosity_error()


def read_model(path: Path | str, dtype: str, device: str = "cpu", *, attention: str | None = None) -> Generates:
    """The causal language model of a folder, in evaluation mode, with weights of the named type on a device.

    Args:
        attention: what computes it, by transformers' name; ``None`` has transformers choose.
    """
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), attn_implementation=attention)
    nn.Module.eval(model)
    model.to(device)  # type: ignore[arg-type]  # wrapped: mypy takes it for no method
    return cast(Generates, model)


def greedy(tokens: int) -> GenerationConfig:
    """So many greedy tokens, whatever they are."""
    return GenerationConfig(  # type: ignore[no-untyped-call]  # transformers leaves it unannotated
        max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
