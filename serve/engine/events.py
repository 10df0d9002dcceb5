"""The events of a request, made from its state."""

from __future__ import annotations

from serve.engine.sequence import LiveRequest, Sequence
from serve.engine.stopping import Stop
from serve.errors import RequestError
from serve.types import MadeBy, PromptReady, RequestFailed, SequenceFinished, Timings, TokenLogprob, TokensOut, Usage


def prompt_event(leader: Sequence) -> PromptReady:
    """The prompt of the request is computed, by its first sequence."""
    request = leader.request
    started = request.started_seconds
    return PromptReady(
        request_id=request.generation.request_id,
        prompt_tokens=request.num_prompt_tokens,
        cached_tokens=leader.cached_tokens,
        queue_seconds=None if started is None else started - request.generation.arrival_seconds,
        logprobs=tuple(request.prompt_logprobs),
    )


def token_event(seq: Sequence, text: str, token_id: int | None, logprob: TokenLogprob | None) -> TokensOut:
    """A sequence has new output. ``token_id`` is ``None`` for one the client does not hear of."""
    return TokensOut(
        request_id=seq.request.generation.request_id,
        index=seq.index,
        text=text,
        token_ids=() if token_id is None else (token_id,),
        logprobs=() if token_id is None or logprob is None else (logprob,),
    )


def finished_event(seq: Sequence, stop: Stop, now: float) -> SequenceFinished:
    """A sequence has ended and left its request; the request is done if it was the last."""
    request = seq.request
    arrival = request.generation.arrival_seconds
    started = now if request.started_seconds is None else request.started_seconds
    first_token = now if seq.first_token_seconds is None else seq.first_token_seconds
    return SequenceFinished(
        request_id=request.generation.request_id,
        index=seq.index,
        reason=stop.reason,
        matched_stop=stop.matched,
        usage=Usage(
            prompt_tokens=request.num_prompt_tokens,
            cached_tokens=seq.cached_tokens,
            completion_tokens=len(seq.token_ids) - request.num_prompt_tokens,
        ),
        timings=Timings(
            queue_seconds=started - arrival, first_token_seconds=first_token - arrival, total_seconds=now - arrival
        ),
        seed=request.generation.sampling.seed,
        request_done=not request.sequences,
        made_by=tuple(MadeBy(first, weights.checkpoint_step) for first, weights in seq.made_by),
        proposed_tokens=seq.speculation.proposed if seq.speculation else 0,
        accepted_tokens=seq.speculation.accepted if seq.speculation else 0,
    )


def failed_event(request: LiveRequest, error: RequestError) -> RequestFailed:
    """The request is about to end with ``error``; its sequences still have what was computed for them."""
    arrival, started = request.generation.arrival_seconds, request.started_seconds
    return RequestFailed(
        request_id=request.generation.request_id,
        error=error,
        queue_seconds=None if started is None else started - arrival,
        computed_tokens=sum(seq.num_spent for seq in request.sequences),
    )
