"""What a step costs the engine itself: `python -m benchmarks.scheduler` prints milliseconds per step.

The executor answers at once with the same token for all, so what is measured is admission, scheduling, applying and
emitting, and within that the part before the executor is called: admission and scheduling. Steps are timed one by one, in CPU
time of their thread; the executor's own time is taken off.

The case ``carried`` adds what a step costs between engine and model: the plan becomes bytes, a plan again and a batch of
tensors, the result bytes and a result.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections import deque

import torch

from serve.engine.engine import Engine, EngineLimits
from serve.engine.executor import ModelFacts
from serve.engine.plan import Sampled, StepPlan, StepResult
from serve.engine.text import TextStream
from serve.types import Generation, RequestId, ResponseOptions, SamplingParams, StoppingParams
from serve.worker import wire
from serve.worker.batch import SequenceTable

BLOCK_TOKENS = 16
PROMPT_TOKENS = 64


class InstantExecutor:
    """Samples token 7 everywhere, and keeps account of its own time."""

    def __init__(self, *, carries: bool = False) -> None:
        """``carries``: plans and results go the way they go to a rank, whose tables are kept too."""
        self.began = 0.0
        """When it was last called: until then the step was being scheduled."""
        self.seconds = 0.0
        self._results: deque[StepResult] = deque()
        self._table = SequenceTable(BLOCK_TOKENS, torch.device("cpu")) if carries else None

    def launch(self, plan: StepPlan, *, overtakes: bool = False) -> None:
        """See ``serve.engine.executor.Executor``."""
        self.began = time.thread_time()
        sampled = tuple(Sampled(sequence=span.sequence, token_id=7) for span in plan.spans if span.sample)
        result = StepResult(step=plan.step, sampled=sampled)
        self.seconds = time.thread_time() - self.began
        if self._table is not None:
            self._table.apply(wire.decode_plan(wire.encode(plan)))
            self._table.keep_drawn((answer.sequence, answer.token_id) for answer in sampled)
            result = wire.decode_result(wire.encode(result))
        self._results.append(result)

    def wait(self, seconds: float, bell: int | None = None) -> bool:
        """See ``serve.engine.executor.Executor``: results are there at once."""
        return True

    def collect(self) -> StepResult:
        """See ``serve.engine.executor.Executor``."""
        return self._results.popleft()

    def execute(self, plan: StepPlan) -> StepResult:
        """See ``serve.engine.executor.Executor``."""
        self.launch(plan)
        return self.collect()


def _engine(executor: InstantExecutor, running: int, waiting: int, new_tokens: int, step_tokens: int) -> Engine:
    blocks = running * (1 + -(-(PROMPT_TOKENS + new_tokens) // BLOCK_TOKENS))
    blocks += blocks // 50  # what admission keeps free
    facts = ModelFacts(
        family="none", vocab_size=50_000, max_model_len=8192, eos_ids=(0,), dtype="none", device="none",
        num_blocks=blocks, block_tokens=BLOCK_TOKENS, num_parameters=1, checkpoint_step=None,
    )  # fmt: skip
    limits = EngineLimits(
        max_num_seqs=running, max_step_tokens=step_tokens, max_queued_requests=running + waiting,
        max_queued_tokens=(running + waiting) * PROMPT_TOKENS, prefix_caching=True,
    )  # fmt: skip

    def no_text(generation: Generation, index: int) -> TextStream:
        raise AssertionError("no text was asked for")

    return Engine(facts=facts, limits=limits, executor=executor, open_text=no_text, clock=time.monotonic)


def _request(number: int, new_tokens: int) -> Generation:
    return Generation(
        request_id=RequestId(f"r{number}"),
        prompt_ids=tuple((number * 31 + position * 7) % 50_000 for position in range(PROMPT_TOKENS)),
        sampling=SamplingParams(),
        stopping=StoppingParams(max_new_tokens=new_tokens),
        response=ResponseOptions(text=False),
        deadline_seconds=time.monotonic() + 3600 + number % 100,
    )


def measure(running: int, waiting: int, steps: int, *, churn: bool, carries: bool = False) -> list[tuple[float, float]]:
    """(milliseconds in all, milliseconds of scheduling) of each step, ``waiting`` requests in the queue behind the batch.

    Args:
        churn: sequences end and waiting ones take their places all the time; otherwise the batch only decodes.
        carries: of ``InstantExecutor``.
    """
    executor = InstantExecutor(carries=carries)
    new_tokens = 64 if churn else steps + 200
    # Churn replaces a sequence in 32 steps or so, at PROMPT_TOKENS each: three times the batch pays for that.
    engine = _engine(executor, running, waiting, new_tokens, step_tokens=max(4 * running, 512))
    for number in range(running + waiting):
        engine.add(_request(number, 1 + number * 17 % new_tokens if churn else new_tokens))
    for _ in range(new_tokens if churn else PROMPT_TOKENS):  # fill the batch, and let churn become steady
        engine.step()
    assert engine.stats().num_running > 0.9 * running, f"only {engine.stats().num_running} of {running} are running"
    times = []
    gc.collect()
    assert engine.stats().num_waiting >= waiting // 2, "the queue ran dry"
    for _ in range(steps):
        began = time.thread_time()
        engine.step()
        in_all = time.thread_time() - began - executor.seconds
        times.append((in_all * 1000, (executor.began - began) * 1000))
    return times


def main() -> None:
    """Print one line per case."""
    parser = argparse.ArgumentParser(description="Milliseconds the engine itself takes per step.")
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    print(f"{'running':>8} {'waiting':>8} {'case':>16} {'step ms':>9} {'p99':>7} {'schedule ms':>13} {'p99':>7}")
    cases = ((0, False, False), (10_000, False, False), (10_000, True, False), (0, False, True), (10_000, True, True))
    for waiting, churn, carries in cases:
        pairs = measure(arguments.running, waiting, arguments.steps, churn=churn, carries=carries)
        step, schedule = (sorted(column) for column in zip(*pairs, strict=True))
        p99 = int(len(pairs) * 0.99)
        case = ("churn" if churn else "decode") + (", carried" if carries else "")
        print(f"{arguments.running:>8} {waiting:>8} {case:>16} ", end="")
        print(f"{statistics.median(step):>8.3f} {step[p99]:>7.3f} {statistics.median(schedule):>13.3f} {schedule[p99]:>7.3f}")


if __name__ == "__main__":
    main()
