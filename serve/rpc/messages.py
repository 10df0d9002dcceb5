"""The engine's events to messages of the wire."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeVar

from serve.errors import InvalidRequest, RequestError
from serve.rpc.status import RETRIED_LATER, code_number, reason_of
from serve.rpc.threads import in_message_thread
from serve.types import FinishReason, Generation, PromptReady, SequenceFinished, TokenLogprob, TokensOut, Usage
from serve.v1 import inference_pb2, types_pb2

T = TypeVar("T")

INLINE_LOGPROBS: Final = 2048
"""Log probabilities of one event that are converted on the event loop."""

REASON: Final = {
    FinishReason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
    FinishReason.EOS: types_pb2.FINISH_REASON_EOS,
    FinishReason.STOP_STRING: types_pb2.FINISH_REASON_STOP_STRING,
    FinishReason.STOP_ID: types_pb2.FINISH_REASON_STOP_ID,
}


async def event_message(
    event: PromptReady | TokensOut | SequenceFinished, generation: Generation
) -> inference_pb2.GenerateEvent:
    """One event of a stream."""
    return await converted(_logprobs(event), lambda: _event_message(event, generation))


def _logprobs(event: PromptReady | TokensOut | SequenceFinished) -> Sequence[TokenLogprob | None]:
    return () if isinstance(event, SequenceFinished) else event.logprobs


def _event_message(event: PromptReady | TokensOut | SequenceFinished, generation: Generation) -> inference_pb2.GenerateEvent:
    match event:
        case TokensOut():
            return inference_pb2.GenerateEvent(request_id=generation.request_id, delta=_delta(event, generation))
        case PromptReady():
            message = inference_pb2.GenerateEvent(request_id=generation.request_id)
            fill_prompt(message.prompt, event, generation)
            return message
        case SequenceFinished():
            return inference_pb2.GenerateEvent(request_id=generation.request_id, finish=finish(event))


async def converted(logprobs: Sequence[TokenLogprob | None], convert: Callable[[], T]) -> T:
    """What ``convert`` makes of an event with these log probabilities; many are converted beside the event loop."""
    wanted = 0 if not logprobs or logprobs[-1] is None else len(logprobs) * (1 + len(logprobs[-1].top))
    return await in_message_thread(convert) if wanted > INLINE_LOGPROBS else convert()


def says_something(event: PromptReady | TokensOut | SequenceFinished, generation: Generation) -> bool:
    """False for a delta of which the client asked for nothing: a token whose text is held back, say."""
    if not isinstance(event, TokensOut):
        return True
    response = generation.response
    return bool((response.text and event.text) or (response.token_ids and event.token_ids) or event.logprobs)


def error_event(request_id: str, error: RequestError) -> inference_pb2.GenerateEvent:
    """The end of one request of a batch, by an error."""
    message = inference_pb2.Error(code=code_number(error), message=str(error), reason=reason_of(error))
    if isinstance(error, InvalidRequest):
        for violation in error.violations:
            message.violations.add(field=violation.field, description=violation.rule)
    if isinstance(error, RETRIED_LATER):
        message.retry_after_seconds = error.retry_after_seconds
    return inference_pb2.GenerateEvent(request_id=request_id, error=message)


def fill_prompt(info: inference_pb2.PromptInfo, event: PromptReady, generation: Generation) -> None:
    """What became known of the prompt; with the prompt itself where echo was asked for."""
    response = generation.response
    info.prompt_tokens, info.cached_tokens = event.prompt_tokens, event.cached_tokens
    info.logprobs.extend(prompt_logprobs(event.logprobs, generation.prompt_ids))
    if response.echo and response.text:
        info.text = generation.prompt_text
    if response.echo and response.token_ids:
        info.token_ids.extend(generation.prompt_ids)


def _delta(event: TokensOut, generation: Generation) -> inference_pb2.Delta:
    response = generation.response
    delta = inference_pb2.Delta(index=event.index)
    if response.text:
        delta.text = event.text
    if response.token_ids:
        delta.token_ids.extend(event.token_ids)
    if event.logprobs:
        delta.logprobs.extend(map(_logprob, event.logprobs))
    return delta


def finish(event: SequenceFinished) -> inference_pb2.Finish:
    """How one sequence ended."""
    timings = types_pb2.Timings(
        queue_seconds=event.timings.queue_seconds,
        first_token_seconds=event.timings.first_token_seconds,
        total_seconds=event.timings.total_seconds,
    )
    message = inference_pb2.Finish(
        index=event.index, reason=REASON[event.reason], usage=usage(event.usage), timings=timings, seed=event.seed,
        proposed_tokens=event.proposed_tokens, accepted_tokens=event.accepted_tokens,
    )  # fmt: skip
    for made in event.made_by:
        message.made_by.add(first_token=made.first_token, checkpoint_step=made.checkpoint_step)
    if event.made_by and event.made_by[-1].checkpoint_step is not None:
        message.checkpoint_step = event.made_by[-1].checkpoint_step
    match event.matched_stop:
        case str():
            message.stop_string = event.matched_stop
        case int():
            message.stop_id = event.matched_stop
        case None:
            pass
    return message


def usage(value: Usage) -> types_pb2.Usage:
    return types_pb2.Usage(
        prompt_tokens=value.prompt_tokens, cached_tokens=value.cached_tokens, completion_tokens=value.completion_tokens
    )


def prompt_logprobs(logprobs: Sequence[TokenLogprob | None], prompt_ids: Sequence[int]) -> Iterable[types_pb2.TokenLogprob]:
    """One per prompt token; those that nothing predicts have an id alone."""
    for entry, token_id in zip(logprobs, prompt_ids, strict=False):
        yield types_pb2.TokenLogprob(token_id=token_id) if entry is None else _logprob(entry)


def _logprob(entry: TokenLogprob) -> types_pb2.TokenLogprob:
    top = [types_pb2.TopLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in entry.top]
    return types_pb2.TokenLogprob(token_id=entry.token_id, logprob=entry.logprob, rank=entry.rank, top=top)


class ResponseBuilder:
    """Gathers a request's events into the answer of a unary call."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._message = inference_pb2.GenerateResponse(request_id=generation.request_id)
        self._texts: list[list[str]] = [[] for _ in range(generation.num_sequences)]
        for index in range(generation.num_sequences):
            self._message.completions.add(index=index)

    async def add(self, event: PromptReady | TokensOut | SequenceFinished) -> None:
        """Take one event of the request into the answer."""
        await converted(_logprobs(event), lambda: self._add(event))

    def _add(self, event: PromptReady | TokensOut | SequenceFinished) -> None:
        match event:
            case PromptReady():
                self._message.prompt.SetInParent()
                fill_prompt(self._message.prompt, event, self._generation)
            case TokensOut():
                self._add_tokens(event)
            case SequenceFinished():
                self._message.completions[event.index].finish.CopyFrom(finish(event))

    def _add_tokens(self, event: TokensOut) -> None:
        completion, response = self._message.completions[event.index], self._generation.response
        if response.text:
            self._texts[event.index].append(event.text)
        if response.token_ids:
            completion.token_ids.extend(event.token_ids)
        completion.logprobs.extend(map(_logprob, event.logprobs))

    def build(self) -> inference_pb2.GenerateResponse:
        """The whole answer, once every event was added."""
        for completion, texts in zip(self._message.completions, self._texts, strict=True):
            completion.text = "".join(texts)
        return self._message
