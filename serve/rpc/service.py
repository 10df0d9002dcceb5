"""The Inference service: convert, call, convert."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from serve.errors import DeadlineExpired, Loading, QueueFull
from serve.metrics import Metrics
from serve.rpc import convert, messages
from serve.rpc.abortable import Abortable
from serve.rpc.audit import note
from serve.rpc.batch import run_batch
from serve.rpc.context import Context
from serve.rpc.convert import Call
from serve.rpc.deadlines import LEAST_SECONDS, leave
from serve.rpc.decoding import Malformed
from serve.rpc.identity import CALLER
from serve.rpc.model import Models, ServedModel
from serve.rpc.scoring import Scorer
from serve.rpc.tenants import REFUSALS, Tenants, Ticket
from serve.runtime.gateway import Gateway
from serve.runtime.stream import Stream
from serve.types import Event, Generation, PromptReady, RequestId, TokensOut
from serve.v1 import inference_pb2


class InferenceService:
    """Text generation and scoring. Owns nothing: requests live in the gateway, and end with their calls."""

    def __init__(self, gateway: Gateway, models: Models, metrics: Metrics, clock: Callable[[], float]) -> None:
        """
        Args:
            clock: monotonic seconds, the same clock as the engine's.
        """
        self._gateway = gateway
        self._models = models
        self._metrics = metrics
        self._clock = clock
        self._tenants = Tenants(clock, metrics.tenants, most_queued=gateway.config.admission.max_queued_requests)
        self._tickets: dict[Stream, Ticket] = {}
        """One for each request under way, but for those of scoring calls, which have one together."""
        self._abortable = Abortable()
        self._scorer = Scorer(gateway, self._enter, self._leave, metrics.rejected)

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Context) -> inference_pb2.GenerateResponse:
        """Generate and answer once."""
        generation, stream = await self._stream(request, context)
        answer = messages.ResponseBuilder(generation)
        async for event in stream:
            self._heard(event)
            await answer.add(event)
        return answer.build()

    async def GenerateStream(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateEvent]:
        """Generate and answer piece by piece. However the call ends, its KV blocks are freed."""
        generation, stream = await self._stream(request, context)
        async for event in stream:
            self._heard(event)
            if messages.says_something(event, generation):
                yield await messages.event_message(event, generation)

    async def GenerateBatch(
        self, requests: AsyncIterator[inference_pb2.GenerateRequest | Malformed], context: Context
    ) -> AsyncIterator[inference_pb2.GenerateEvent]:
        """Run many requests on one call."""
        call = self._call(context)

        async def start(request: inference_pb2.GenerateRequest) -> tuple[Generation, Stream]:
            return await self._start(request, replace(call, arrival_seconds=self._clock()))

        async for message in run_batch(requests, start, self._heard, self._leave, self._gateway.config):
            yield message

    async def Score(self, request: inference_pb2.ScoreRequest, context: Context) -> inference_pb2.ScoreResponse:
        """Measure how likely given texts are."""
        with self._abortable.named(request.request_id):
            return await self._scorer.score(request, self._model(), self._call(context))

    def abort(self, request_id: RequestId) -> bool:
        """End what the engine does not know by this name: a scoring call, or a request that is being made ready for the engine.

        False if there is no such thing.
        """
        return self._abortable.abort(request_id)

    async def _stream(self, request: inference_pb2.GenerateRequest, context: Context) -> tuple[Generation, Stream]:
        generation, stream = await self._start(request, self._call(context))
        # Runs however the call ends, also where no exception can reach the handler.
        context.add_done_callback(lambda _: self._leave(stream))
        return generation, stream

    async def _start(self, request: inference_pb2.GenerateRequest, call: Call) -> tuple[Generation, Stream]:
        with self._abortable.named(request.request_id):
            return await self._admitted(request, call)

    async def _admitted(self, request: inference_pb2.GenerateRequest, call: Call) -> tuple[Generation, Stream]:
        """Once the caller's limits allow it; they are asked before the prompt costs anything."""
        model = self._model()
        await convert.check(request, model)
        note(request.request_id)
        ticket = self._enter(request.priority)
        try:
            generation = await self._converted(request, model, call)
            note(generation.request_id)
            await ticket.begin(len(generation.prompt_ids))
            note(requests=1, prompt_tokens=len(generation.prompt_ids))
            stream = self._gateway.start(generation, model.edition)
        except BaseException as error:
            ticket.end(refused=isinstance(error, REFUSALS))
            raise
        self._tickets[stream] = ticket
        return generation, stream

    async def _converted(self, request: inference_pb2.GenerateRequest, model: ServedModel, call: Call) -> Generation:
        try:
            return await convert.to_generation(request, model, call)
        except QueueFull as refusal:
            self._metrics.rejected(refusal)  # as with Loading
            raise

    def _enter(self, priority: int) -> Ticket:
        return self._tenants.enter(CALLER.get(), priority)

    def _heard(self, event: Event) -> None:
        if isinstance(event, TokensOut):
            self._tenants.generated(CALLER.get(), len(event.token_ids))
            note(generated_tokens=len(event.token_ids))
        elif isinstance(event, PromptReady):
            note(queue_seconds=event.queue_seconds)

    def _leave(self, stream: Stream) -> None:
        leave(stream, self._clock())
        ticket = self._tickets.pop(stream, None)
        if ticket is not None:
            ticket.end(refused=stream.is_refused)

    def _model(self) -> ServedModel:
        try:
            return self._models.current()
        except Loading as refusal:
            self._metrics.rejected(refusal)  # the gateway, which counts the others, never sees this request
            raise

    def _call(self, context: Context) -> Call:
        now, caller = self._clock(), CALLER.get()
        remaining = context.time_remaining()
        if remaining is not None and remaining < LEAST_SECONDS:
            raise DeadlineExpired("the deadline passed before anything could be computed")
        deadline = None if remaining is None else now + remaining
        return Call(now, deadline, caller.name, caller.limits.shared_cache)
