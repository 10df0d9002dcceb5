"""The Inference service: convert, call, convert."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from serve.errors import DeadlineExpired, Loading
from serve.metrics import Metrics
from serve.rpc import convert, messages
from serve.rpc.audit import note
from serve.rpc.batch import run_batch
from serve.rpc.context import Context
from serve.rpc.convert import Call
from serve.rpc.deadlines import LEAST_SECONDS, leave
from serve.rpc.decoding import Malformed
from serve.rpc.identity import CALLER
from serve.rpc.model import Models, ServedModel
from serve.rpc.scoring import Scorer
from serve.rpc.tenants import Tenants
from serve.runtime.gateway import Gateway
from serve.runtime.stream import Stream
from serve.types import Event, Generation, PromptReady, TokensOut
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
        self._tenants = Tenants(clock, metrics.tenant_refused)
        self._ends: dict[Stream, Callable[[], None]] = {}
        """What is told of the end of each request."""
        self.scorer = Scorer(gateway, self._admit, self._leave)

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Context) -> inference_pb2.GenerateResponse:
        """Generate and answer once."""
        model = self._model()
        generation = await convert.to_generation(request, model, self._call(context))
        answer = messages.ResponseBuilder(generation)
        async for event in await self._stream(generation, model, context):
            self._heard(event)
            await answer.add(event)
        return answer.build()

    async def GenerateStream(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateEvent]:
        """Generate and answer piece by piece. However the call ends, its KV blocks are freed."""
        model = self._model()
        generation = await convert.to_generation(request, model, self._call(context))
        async for event in await self._stream(generation, model, context):
            self._heard(event)
            if messages.says_something(event, generation):
                yield await messages.event_message(event, generation)

    async def GenerateBatch(
        self, requests: AsyncIterator[inference_pb2.GenerateRequest | Malformed], context: Context
    ) -> AsyncIterator[inference_pb2.GenerateEvent]:
        """Run many requests on one call."""
        call = self._call(context)

        async def start(request: inference_pb2.GenerateRequest) -> tuple[Generation, Stream]:
            now = Call(self._clock(), call.deadline_seconds, call.tenant)
            model = self._model()
            generation = await convert.to_generation(request, model, now)
            return generation, await self._start(generation, model)

        async for message in run_batch(requests, start, self._heard, self._leave, self._gateway.config):
            yield message

    async def Score(self, request: inference_pb2.ScoreRequest, context: Context) -> inference_pb2.ScoreResponse:
        """Measure how likely given texts are."""
        return await self.scorer.score(request, self._model(), self._call(context))

    async def _stream(self, generation: Generation, model: ServedModel, context: Context) -> Stream:
        stream = await self._start(generation, model)
        # Runs however the call ends, also where no exception can reach the handler.
        context.add_done_callback(lambda _: self._leave(stream))
        return stream

    async def _start(self, generation: Generation, model: ServedModel) -> Stream:
        """Once the caller's limits allow it."""
        note(generation.request_id)
        end = await self._admit(len(generation.prompt_ids), generation.priority)
        try:
            stream = self._gateway.start(generation, model.edition)
        except BaseException:
            end()
            raise
        self._ends[stream] = end
        return stream

    async def _admit(self, prompt_tokens: int, priority: int) -> Callable[[], None]:
        end = await self._tenants.admit(CALLER.get(), prompt_tokens=prompt_tokens, priority=priority)
        note(requests=1, prompt_tokens=prompt_tokens)
        return end

    def _heard(self, event: Event) -> None:
        if isinstance(event, TokensOut):
            self._tenants.generated(CALLER.get(), len(event.token_ids))
            note(generated_tokens=len(event.token_ids))
        elif isinstance(event, PromptReady):
            note(queue_seconds=event.queue_seconds)

    def _leave(self, stream: Stream) -> None:
        leave(stream, self._clock())
        self._ends.pop(stream, _nothing)()

    def _model(self) -> ServedModel:
        try:
            return self._models.current()
        except Loading as refusal:
            self._metrics.rejected(refusal)  # the gateway, which counts the others, never sees this request
            raise

    def _call(self, context: Context) -> Call:
        now = self._clock()
        remaining = context.time_remaining()
        if remaining is None:
            return Call(now, None, CALLER.get().name)
        if remaining < LEAST_SECONDS:
            raise DeadlineExpired("the deadline passed before anything could be computed")
        return Call(now, now + remaining, CALLER.get().name)


def _nothing() -> None:
    """Items of a Score call end with it."""
