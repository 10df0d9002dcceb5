"""Steps with prompts have the host wait for nothing before they are launched whole: on ``meta``, with the back end of CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from serve.engine.plan import DRAFTED, Span, Start, StepPlan
from serve.model.cuda.backend import TritonBackend
from serve.model.sending import send
from serve.types import BlockId, SamplingParams, SequenceId
from serve.worker.drafting import Drafting
from serve.worker.parallel import Ranks
from serve.worker.runner import Runner
from tests.serve.worker.launches import without_kernels
from tests.serve.worker.test_decode_graphs import CASES, saved
from tests.serve.worker.waits import META, WholeStep, on_meta

LENGTHS = (40, 100, 300, 5, 17)
SAMPLING = (
    SamplingParams(),
    SamplingParams(),
    SamplingParams(temperature=0.8, top_p=0.9, seed=3),
    SamplingParams(temperature=0.7, typical_p=0.8, repetition_penalty=1.2, presence_penalty=0.1, banned_ids=(3,), seed=5),
    SamplingParams(allowed_ids=(1, 2, 3), logit_bias=((2, 1.5),)),
)


@pytest.fixture(autouse=True)
def _no_kernels() -> Iterator[None]:
    with without_kernels([]):
        yield


def start(place: int, **told: int) -> Start:
    ids = tuple((11 * place + 3 * i) % 400 + 1 for i in range(LENGTHS[place]))
    return Start(
        sequence=SequenceId(place), index=0, token_ids=ids, num_prompt_tokens=len(ids), sampling=SAMPLING[place], **told
    )


def span(place: int, begin: int, count: int, **more: object) -> Span:
    blocks = () if begin else tuple(BlockId(1 + 20 * place + block) for block in range(20 if place == 2 else 8))
    return Span(sequence=SequenceId(place), start=begin, count=count, new_blocks=blocks, **more)  # type: ignore[arg-type]


PLANS = (
    # Prompts, whole and in part, with logprobs of both; more of them than one product of the head has rows.
    StepPlan(
        step=1,
        starts=(start(0), start(1, prompt_logprobs=2), start(2, logprobs=3), start(3), start(4)),
        spans=(
            span(0, 0, 40, sample=True),
            span(1, 0, 80),
            span(2, 0, 300, sample=True),
            span(3, 0, 5, sample=True),
            span(4, 0, 17, sample=True),
        ),
    ),
    # A chunk between tokens that follow, one of them with guesses.
    StepPlan(
        step=2,
        spans=(
            span(0, 40, 4, new_tokens=(7,), sample=True, proposed=(8, 9, 10)),
            span(1, 80, 20, sample=True),
            span(2, 300, 1, continues=True, sample=True),
            span(3, 5, 1, new_tokens=(4,), sample=True),
        ),
    ),
)


@pytest.mark.parametrize("name", CASES)
def test_no_step_with_prompts_has_the_host_wait_before_all_of_it_is_launched(name: str, tmp_path: Path) -> None:
    runner = Runner(on_meta(saved(name, tmp_path), TritonBackend(132)), Ranks(0, 1))
    for plan, sampled, told in zip(PLANS, (4, 4), (2, 1), strict=True):
        with WholeStep() as looked:
            result = runner.execute(plan)
        assert looked.found == []
        assert result is not None
        assert len(result.sampled) == sampled
        assert len(result.prompt_logprobs) == told
        assert looked.reads > told, "what was sampled, and each part of a prompt"


def test_what_a_draft_model_is_given_is_not_waited_for_either(tmp_path: Path) -> None:
    """Each guess is read before the next one, which depends on it, is computed."""
    model = on_meta(saved("llama", tmp_path), TritonBackend(132))
    runner = Runner(model, Ranks(0, 1), draft=model)
    runner.execute(StepPlan(step=1, starts=(start(0), start(3)), spans=(span(0, 0, 39), span(3, 0, 4))))
    wanted = (span(0, 39, 3, sample=True, proposed=(DRAFTED,) * 2), span(3, 4, 2, sample=True, proposed=(DRAFTED,)))
    with WholeStep(reads_between=True) as looked, torch.inference_mode():
        guessed = Drafting(model, runner._table, model, Ranks(0, 1)).guess(wanted)
    assert [each.proposed for each in guessed] == [(1, 1), (1,)]
    assert (looked.found, looked.reads) == ([], 2), "one for each guess"


def test_what_waits_is_found() -> None:
    device = torch.zeros(4, 3, device=META)
    with torch.inference_mode(), WholeStep() as looked:
        device[[0, 2]]
        device[torch.tensor([0, 2])]
        torch.tensor([1.0, 2.0], device=META)
        device[send(torch.tensor([0, 2]), META)]
        device.sum().tolist()
        device + 1
    assert [found for found in looked.found if not found.startswith("aten.detach")] == [
        "aten.index.Tensor, by a list of the host's",
        "aten.index.Tensor",
        "torch.tensor, on the device",
        "aten.add.Tensor, launched after the host has read",
    ]
