"""Answers that rounding could not have changed: the ones of which tests may ask that every token comes again.

Where two tokens are equally likely up to the last bits of a sum, whatever changes the order of that sum decides between them:
ranks, stages, how a prompt is cut into steps, what is computed beside it. That is no fault of who serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from transformers import PreTrainedModel

from serve.engine.plan import Start
from serve.types import SamplingParams, SequenceId
from serve.v1 import inference_pb2
from serve.worker.batch import SequenceState
from serve.worker.sampling.backend import TorchSampling
from serve.worker.sampling.sampler import sample

_NOISE: Final = 1e-5
"""Standard deviation of what is added to logits: ten times what another order of summing does to those of the tests' models."""
_TIMES: Final = 8


@torch.inference_mode()
def is_decisive(model: PreTrainedModel, prompt: Sequence[int], answer: Sequence[int], sampling: SamplingParams) -> bool:
    """Whether every token of ``answer`` is what follows, also where logits are a little different.

    Args:
        model: in fp32, as transformers has it.
        answer: what sequence 0 of a request with this sampling got.
    """
    ids, first = [*prompt, *answer], len(prompt)
    logits_TV: torch.Tensor = model(torch.tensor([ids[:-1]])).logits[0, first - 1 :]
    start = Start(sequence=SequenceId(0), index=0, token_ids=tuple(prompt), num_prompt_tokens=first, sampling=sampling)
    states = [SequenceState(start, ids[:length]) for length in range(first, len(ids))]
    generator = torch.Generator().manual_seed(0)
    for _ in range(_TIMES):
        noise_TV = _NOISE * torch.randn(logits_TV.shape, generator=generator)
        chosen, _ = sample(logits_TV + noise_TV, states, TorchSampling())
        if [each.token_id for each in chosen] != list(answer):
            return False
    return True


def is_answer_decisive(model: PreTrainedModel, request: inference_pb2.GenerateRequest, answer: Sequence[int]) -> bool:
    """As :func:`is_decisive`, of a request as it was sent: a prompt of ids, whose sampling has nothing but plain fields set."""
    sampling = SamplingParams(**{field.name: value for field, value in request.sampling.ListFields()})
    return is_decisive(model, request.token_ids.ids, answer, sampling)
