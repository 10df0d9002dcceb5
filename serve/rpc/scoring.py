"""Log-likelihoods of given texts: prompts that are computed with logprobs and not continued."""

from __future__ import annotations

import asyncio
import functools
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from serve.errors import DuplicateRequest, InvalidRequest, QueueFull
from serve.rpc import messages
from serve.rpc.audit import note
from serve.rpc.checks import Checks
from serve.rpc.convert import Call, check_common, new_request_id
from serve.rpc.model import ServedModel, encode_now
from serve.rpc.prompts import adds_special_tokens, check_ids, check_special_tokens
from serve.rpc.tenants import REFUSALS, Ticket
from serve.rpc.threads import INLINE_BYTES, off_loop
from serve.runtime.gateway import Gateway
from serve.runtime.stream import Stream
from serve.types import (
    Generation,
    PromptReady,
    RequestId,
    ResponseOptions,
    SamplingParams,
    SequenceFinished,
    StoppingParams,
    TokenLogprob,
)
from serve.v1 import inference_pb2

ITEMS_AT_ONCE: Final = 16
"""Items of one call in the engine at the same time; the rest waits here, not in the queue that all share."""


_ID: Final = "I"
"""How an array holds an id: in four bytes, where a tuple takes up to forty."""


@dataclass(frozen=True, slots=True)
class _Sequence:
    """One item as ids; the target is ``ids[start:end]``."""

    ids: array[int]
    start: int
    end: int


class Scorer:
    """Scores the items of calls, each a request of its own to the engine; one name is of one call."""

    def __init__(
        self,
        gateway: Gateway,
        enter: Callable[[int], Ticket],
        leave: Callable[[Stream], None],
        refused: Callable[[QueueFull], None],
    ) -> None:
        """
        Args:
            enter: lets a call of a priority in, or refuses it.
            leave: ends a stream that nobody reads any more.
            refused: told of what is refused here for want of room.
        """
        self._gateway = gateway
        self._enter = enter
        self._leave = leave
        self._refused = refused
        self._live: set[RequestId] = set()

    async def score(self, request: inference_pb2.ScoreRequest, model: ServedModel, call: Call) -> inference_pb2.ScoreResponse:
        """Score every item.

        Raises:
            InvalidRequest: fields break their rules, or an item is too long.
            FeatureOff: there are texts, and the model has no tokenizer.
            DuplicateRequest: a scoring call of this name goes on.
            RequestError: the first item that failed; the others are given up.
        """
        model.require_name(request.model)
        await off_loop(request, lambda: _check(request, model))
        request_id = new_request_id(request.request_id)
        note(request_id)
        ticket = self._enter(request.priority)
        answer = inference_pb2.ScoreResponse(
            request_id=request_id, results=[inference_pb2.ScoreResult() for _ in request.items]
        )
        refused = False
        try:
            sequences = await self._tokenised(request, model)
            num_tokens = sum(len(sequence.ids) for sequence in sequences)
            await ticket.begin(num_tokens)
            note(requests=1, prompt_tokens=num_tokens)
            await self._score(request, model, call, sequences, answer)
        except REFUSALS:
            refused = not any(result.tokens for result in answer.results)
            raise
        finally:
            ticket.end(refused=refused)
        return answer

    async def _tokenised(self, request: inference_pb2.ScoreRequest, model: ServedModel) -> list[_Sequence]:
        def work() -> list[_Sequence]:
            return _sequences(request, model)

        if request.ByteSize() <= INLINE_BYTES or all(item.WhichOneof("target") != "text" for item in request.items):
            return await off_loop(request, work)
        try:
            return await model.in_text_thread(work, request.ByteSize())
        except QueueFull as refusal:
            self._refused(refusal)
            raise

    async def _score(
        self,
        request: inference_pb2.ScoreRequest,
        model: ServedModel,
        call: Call,
        sequences: list[_Sequence],
        answer: inference_pb2.ScoreResponse,
    ) -> None:
        request_id = RequestId(answer.request_id)
        if request_id in self._live:  # of its items the engine may know none any more, or none yet
            raise DuplicateRequest(f"a request with the id {request_id!r} is still alive")
        room = asyncio.Semaphore(ITEMS_AT_ONCE)
        self._live.add(request_id)
        try:
            with self._gateway.call(model.edition) as start:
                async with asyncio.TaskGroup() as group:
                    for place, sequence in enumerate(sequences):
                        generation = functools.partial(_generation, request_id, place, sequence, request, call)
                        group.create_task(self._one(answer.results[place], sequence, generation, start, room))
        except* Exception as failures:
            failure: BaseException = failures
            while isinstance(failure, BaseExceptionGroup):
                failure = failure.exceptions[0]
            raised = failure
        else:
            return
        finally:
            self._live.discard(request_id)
        raise raised

    async def _one(
        self,
        result: inference_pb2.ScoreResult,
        sequence: _Sequence,
        generation: Callable[[], Generation],
        start: Callable[[Generation], Stream],
        room: asyncio.Semaphore,
    ) -> None:
        """Score one item, once there is room, into ``result``."""
        async with room:
            stream = start(generation())
            try:
                async for event in stream:
                    if isinstance(event, PromptReady):
                        note(queue_seconds=event.queue_seconds)
                        logprobs = event.logprobs[sequence.start : sequence.end]
                        await messages.converted(logprobs, functools.partial(_fill, result, logprobs, sequence))
                    elif isinstance(event, SequenceFinished):
                        result.usage.CopyFrom(messages.usage(event.usage))
            finally:
                self._leave(stream)


def _sequences(request: inference_pb2.ScoreRequest, model: ServedModel) -> list[_Sequence]:
    """The items of a request that passed ``_check`` as ids.

    Raises:
        InvalidRequest: an item is too long, or all together have more logprobs than may be asked for.
        FeatureOff: there are texts, and the model has no tokenizer.
    """
    sequences = [_tokenise(place, item, request, model) for place, item in enumerate(request.items)]
    checks = Checks()
    num_tokens = sum(len(sequence.ids) for sequence in sequences)
    checks.logprobs("items", num_tokens, request.top_logprobs, model.config.admission)
    checks.settle()
    return sequences


def _check(request: inference_pb2.ScoreRequest, model: ServedModel) -> None:
    """
    Raises:
        InvalidRequest: fields break their rules.
    """
    checks, limits = Checks(), model.config.admission
    check_common(request.request_id, request.priority, request.cache_salt, checks)
    check_special_tokens("special_tokens", request.special_tokens, checks)
    checks.within("top_logprobs", request.top_logprobs, 0, min(limits.max_logprobs, model.facts.vocab_size))
    if not request.items:
        checks.refuse("items", "is empty; at least one is needed")
    if checks.count("items", request.items, limits.max_score_items):
        for place, item in enumerate(request.items):
            _check_item(f"items[{place}]", item, checks, model)
        num_bytes = sum(len(item.text.encode()) + len(item.context_text.encode()) for item in request.items)
        if num_bytes > limits.max_prompt_bytes:
            checks.refuse("items", f"have {num_bytes} bytes of text together; the limit is {limits.max_prompt_bytes}")
    checks.settle()


def _check_item(field: str, item: inference_pb2.ScoreItem, checks: Checks, model: ServedModel) -> None:
    target, context = item.WhichOneof("target"), item.WhichOneof("context")
    match target:
        case "text":
            if not item.text:
                checks.refuse(f"{field}.text", "is empty; at least one token is needed")
        case "token_ids":
            num_tokens = len(item.context_ids.ids) + len(item.token_ids.ids)
            if num_tokens > model.capacity:
                checks.refuse(field, _too_long(num_tokens, model))
                return
            check_ids(f"{field}.token_ids.ids", item.token_ids, checks, model)
            checks.token_ids(f"{field}.context_ids.ids", item.context_ids.ids, model.facts.vocab_size)
        case _:
            checks.refuse(field, "one of text and token_ids must be set")
    if (target, context) in (("text", "context_ids"), ("token_ids", "context_text")):
        checks.refuse(f"{field}.{context}", f"must be of the same kind as the target, which is {target}")


def _too_long(num_tokens: int, model: ServedModel) -> str:
    return f"has {num_tokens} tokens with its context; a sequence may have {model.capacity}"


def _tokenise(place: int, item: inference_pb2.ScoreItem, request: inference_pb2.ScoreRequest, model: ServedModel) -> _Sequence:
    if item.WhichOneof("target") == "text":
        adds = adds_special_tokens(request.special_tokens, chat=False)
        sequence = _from_text(f"items[{place}]", item, model, adds_special=adds)
    else:
        ids = array(_ID, item.context_ids.ids)
        ids.extend(item.token_ids.ids)
        sequence = _Sequence(ids, len(item.context_ids.ids), len(ids))
    if len(sequence.ids) > model.capacity:
        raise InvalidRequest.of(f"items[{place}]", _too_long(len(sequence.ids), model))
    if sequence.end == sequence.start:
        raise InvalidRequest.of(f"items[{place}].text", "has no tokens; at least one is needed")
    return sequence


def _from_text(field: str, item: inference_pb2.ScoreItem, model: ServedModel, *, adds_special: bool) -> _Sequence:
    tokenizer = model.require_tokenizer("items.text")

    def encoded(text: str, *, adds: bool) -> tuple[int, ...]:
        return encode_now(tokenizer, text, add_special_tokens=adds, field=field, at_most=model.capacity)

    # Tokenizers put a space at the head of the word behind it, so it belongs to the target.
    context = item.context_text.rstrip()
    text = item.context_text[len(context) :] + item.text
    plain = encoded(context + text, adds=False)
    ids = encoded(context + text, adds=True) if adds_special else plain
    num_added = next((at for at in range(len(ids) - len(plain) + 1) if ids[at : at + len(plain)] == plain), 0)
    end = num_added + len(plain)
    num_context = len(encoded(context, adds=False)) if context else 0
    # Where context and target merged into one token, that token is scored.
    return _Sequence(array(_ID, ids), max(num_added, min(num_added + num_context, end - 1)), end)


def _generation(
    request_id: RequestId, place: int, sequence: _Sequence, request: inference_pb2.ScoreRequest, call: Call
) -> Generation:
    # No client can choose a name with a slash, so the items' names meet nobody else's.
    name = request_id if place == 0 else RequestId(f"{request_id}/{place}")
    return Generation(
        request_id=name,
        prompt_ids=tuple(sequence.ids),
        sampling=SamplingParams(),
        stopping=StoppingParams(max_new_tokens=0),
        response=ResponseOptions(text=False, token_ids=False, prompt_logprobs=request.top_logprobs),
        priority=request.priority,
        cache_salt=request.cache_salt,
        tenant=call.tenant,
        shares_cache=call.shares_cache,
        arrival_seconds=call.arrival_seconds,
        deadline_seconds=call.deadline_seconds,
    )


def _fill(result: inference_pb2.ScoreResult, logprobs: tuple[TokenLogprob | None, ...], sequence: _Sequence) -> None:
    result.tokens.extend(messages.prompt_logprobs(logprobs, sequence.ids[sequence.start : sequence.end]))
    scored = [entry for entry in logprobs if entry is not None]
    result.sum = sum(entry.logprob for entry in scored)
    result.is_greedy = all(entry.rank == 1 for entry in scored)
