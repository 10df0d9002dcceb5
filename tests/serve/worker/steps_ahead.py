"""Plans that go on with what the ranks drew, and their steps launched one ahead."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from serve.engine.plan import Span, Start, StepPlan, StepResult
from serve.types import BlockId, SamplingParams, SequenceId
from serve.worker.launched import LaunchedStep
from serve.worker.runner import Runner
from tests.serve.worker.family_worker import BLOCK_TOKENS, CHUNK, NEW_TOKENS, PROMPTS


def plans(
    sampling: Sequence[SamplingParams] = (),
    prompts: Sequence[tuple[int, ...]] = PROMPTS,
    *,
    new_tokens: int = NEW_TOKENS,
    logprobs: int | None = None,
) -> Iterator[StepPlan]:
    """Of prompts in chunks beside one another's tokens, as an engine plans them that never waits for a result.

    Args:
        sampling: of each prompt; greedy without it.
        logprobs: of every second sequence's tokens, and of the others' prompts.
    """
    each = -(-(max(map(len, prompts)) + new_tokens) // BLOCK_TOKENS)
    done, said = [0] * len(prompts), [0] * len(prompts)
    starts = []
    for i, prompt in enumerate(prompts):
        of_tokens, of_prompt = (logprobs, None) if i % 2 == 0 else (None, logprobs)
        params = sampling[i] if sampling else SamplingParams()
        starts.append(
            Start(
                sequence=SequenceId(i), index=0, token_ids=prompt, num_prompt_tokens=len(prompt), sampling=params,
                logprobs=of_tokens, prompt_logprobs=of_prompt,
            )
        )  # fmt: skip
    step = 0
    while any(count < new_tokens for count in said):
        spans, dropped = [], []
        for i, prompt in enumerate(prompts):
            if said[i] == new_tokens:
                if done[i] >= 0:
                    dropped.append(SequenceId(i))
                done[i] = -1
                continue
            total = len(prompt) + said[i]
            count = min(CHUNK, total - done[i])
            blocks = tuple(BlockId(i * each + block) for block in range(each)) if step == 0 else ()
            samples = done[i] + count == total
            spans.append(
                Span(
                    sequence=SequenceId(i), start=done[i], count=count, continues=said[i] > 0, new_blocks=blocks, sample=samples
                )
            )  # fmt: skip
            done[i] += count
            said[i] += samples
        yield StepPlan(step=step, starts=() if step else tuple(starts), spans=tuple(spans), dropped=tuple(dropped))
        step += 1
    yield StepPlan(step=step, dropped=tuple(SequenceId(i) for i in range(len(prompts)) if done[i] >= 0))


class OneAhead:
    """Launches each plan before the one before it is settled, where that may be."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.under_way: deque[LaunchedStep] = deque()
        self.results: deque[StepResult | None] = deque()
        """Of what was settled, in order."""
        self.followed = 0
        """How many plans were launched with another one under way."""

    def launch(self, plan: StepPlan) -> None:
        follows = self.runner.follows(plan)
        if not follows:
            self.settle_all()
        self.followed += bool(self.under_way)
        self.under_way.append(self.runner.launch(plan, follows=follows))
        if len(self.under_way) > 1:
            self.settle_oldest()

    def settle_oldest(self) -> None:
        self.results.append(self.runner.settle(self.under_way.popleft()))

    def settle_all(self) -> None:
        while self.under_way:
            self.settle_oldest()


def one_ahead(
    runner: Runner, wanted: Iterable[StepPlan], settles: random.Random | None = None
) -> tuple[list[StepResult | None], int]:
    """What plans give one ahead, and how many were launched with another one under way.

    Args:
        settles: draws whether a step is settled before the next one comes, as it is where that comes late.
    """
    ahead = OneAhead(runner)
    for plan in wanted:
        if settles is not None and settles.random() < 0.4:
            ahead.settle_all()
        ahead.launch(plan)
    ahead.settle_all()
    return list(ahead.results), ahead.followed
