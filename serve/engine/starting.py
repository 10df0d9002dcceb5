"""What the ranks are told of a sequence that they do not know."""

from __future__ import annotations

from serve.engine.plan import Start
from serve.engine.sequence import Sequence


def start_of(seq: Sequence) -> Start:
    """What the ranks must know of a sequence before its first span."""
    generation = seq.request.generation
    return Start(
        sequence=seq.id,
        index=seq.index,
        token_ids=tuple(seq.token_ids),
        num_prompt_tokens=seq.request.num_prompt_tokens,
        sampling=generation.sampling,
        min_new_tokens=generation.stopping.min_new_tokens,
        end_ids=tuple(sorted(seq.request.rule.end_ids)),
        logprobs=generation.response.logprobs,
        prompt_logprobs=generation.response.prompt_logprobs if seq.wants_prompt_logprobs else None,
    )
