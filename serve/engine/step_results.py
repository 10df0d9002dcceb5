"""What the ranks' answers mean: whether they fit the plan, and what a sampled token does to its sequence."""

from __future__ import annotations

from serve.engine.executor import ExecutorDied
from serve.engine.plan import DRAFTED, Sampled, StepPlan, StepResult
from serve.engine.sequence import Sequence
from serve.engine.stopping import LENGTH, Stop
from serve.types import FinishReason, SequenceId


def check_result(plan: StepPlan, result: StepResult, vocab_size: int) -> dict[SequenceId, list[Sampled]]:
    """See that the result answers the plan, before anything is changed.

    Returns:
        What was chosen for each sequence, in order.

    Raises:
        ExecutorDied: it does not; what the ranks hold is unknown from here on.
    """
    if result.step != plan.step:
        raise ExecutorDied(f"step {plan.step} was answered by step {result.step}")
    sampled, expected = result.sampled, {span.sequence for span in plan.spans if span.sample}
    answers = {answer.sequence: [answer] for answer in sampled}
    if len(answers) == len(sampled) and answers.keys() == expected and not result.faults:  # as nearly always
        tokens = [answer.token_id for answer in sampled]
        if not tokens or (min(tokens) >= 0 and max(tokens) < vocab_size):
            return answers
    return _check_each(plan, result, expected - {fault.sequence for fault in result.faults}, vocab_size)


def _check_each(
    plan: StepPlan, result: StepResult, expected: set[SequenceId], vocab_size: int
) -> dict[SequenceId, list[Sampled]]:
    """What was chosen for each of the sequences that tokens are due for."""
    answers: dict[SequenceId, list[Sampled]] = {}
    for answer in result.sampled:
        answers.setdefault(answer.sequence, []).append(answer)
        if not 0 <= answer.token_id < vocab_size:
            raise ExecutorDied(f"step {plan.step}: token {answer.token_id} is outside the vocabulary of {vocab_size}")
    if answers.keys() != expected:
        raise ExecutorDied(f"step {plan.step}: tokens for {sorted(expected)} were due, and {sorted(answers)} came")
    if len(answers) < len(result.sampled):
        for span in plan.spans:
            before_last = tuple(answer.token_id for answer in answers.get(span.sequence, ())[:-1])
            proposed = span.proposed[: len(before_last)]
            if before_last != proposed and (len(before_last) > len(proposed) or proposed[0] != DRAFTED):
                told = f"{before_last} and one more came for sequence {span.sequence}, of which {span.proposed} was proposed"
                raise ExecutorDied(f"step {plan.step}: {told}")
    return answers


def judge(seq: Sequence, token_id: int, num_generated: int) -> tuple[str, Stop | None]:
    """The text a new token adds, and why the sequence ends, if it does: by id before by stop string before by length."""
    rule, stream = seq.request.rule, seq.text
    stop = rule.by_id(token_id, num_generated) if token_id in rule.end_ids else None
    text = ""
    if stop is None:
        if stream is not None:
            delta = stream.push(token_id)
            text = delta.text
            if delta.matched_stop is not None:
                return text, Stop(FinishReason.STOP_STRING, delta.matched_stop)
        if num_generated >= rule.max_new_tokens:
            stop = LENGTH
    if stop is not None and stream is not None:
        text += stream.finish()
    return text, stop
