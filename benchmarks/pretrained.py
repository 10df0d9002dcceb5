"""The few calls of transformers that it leaves without types, with theirs, and how fast it generates."""

from __future__ import annotations

import time
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


def read_model(path: Path | str, dtype: str, device: str = "cpu") -> Generates:
    """The causal language model of a folder, in evaluation mode, with weights of the named type on a device."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    nn.Module.eval(model)
    model.to(device)  # type: ignore[arg-type]  # wrapped: mypy takes it for no method
    return cast(Generates, model)


def greedy(tokens: int) -> GenerationConfig:
    """So many greedy tokens, whatever they are."""
    return GenerationConfig(  # type: ignore[no-untyped-call]  # transformers leaves it unannotated
        max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )


def by_transformers(model: Generates, prompts: list[list[int]], steps: int, device: str) -> dict[str, Any]:
    """Tokens a second of ``generate`` and of continuous batching, without the prompts: each is also run for one token."""
    ids = torch.tensor(prompts, device=device)
    found: dict[str, Any] = {}

    def generate(tokens: int) -> None:
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)

    def continuous(tokens: int) -> None:
        room = None  # on a GPU it chooses by what is free, on the CPU by all that there is
        if device == "cpu":
            room = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=256)
        answers = model.generate_batch(
            inputs=prompts, generation_config=greedy(tokens), continuous_batching_config=room, progress_bar=False
        )
        assert len(answers) == len(prompts), "some prompts have no answer"
        short = [answer for answer in answers.values() if len(answer.generated_tokens) != tokens]
        assert not short, f"{len(short)} answers are cut short, as those are of which transformers only logs that they failed"

    for name, run in (("generate", generate), ("continuous_batching", continuous)):
        try:
            seconds = []
            for tokens in (1, 1, 1 + steps):  # the first warms up
                began = time.perf_counter()
                run(tokens)
                if device == "cuda":
                    torch.cuda.synchronize()
                seconds.append(time.perf_counter() - began)
            more = seconds[2] - seconds[1]
            found[name] = len(prompts) * steps / more if more > 0 else "not told: the longer run took no longer"
        except Exception as error:  # a peer that cannot do a cell is no reason to lose the others
            found[name] = f"failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return found
