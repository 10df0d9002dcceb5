"""The blocking client."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self, TypeVar, Unpack

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from serve.client import results
from serve.client.affinity import affinity_of
from serve.client.calls import (
    DEFAULT_TIMEOUT_SECONDS,
    SERVING,
    Attempts,
    Deadline,
    RetryPolicy,
    not_serving_in_time,
)
from serve.client.connection import Connecting, Connection, Metadata
from serve.client.errors import TesseraError, from_rpc_error
from serve.client.gathering import gatherer_for
from serve.client.request import (
    ChatMessage,
    Options,
    Prompt,
    Request,
    ScoreItem,
    chat_message,
    filled,
    generate_message,
    named_messages,
    score_message,
    special_tokens_value,
)
from serve.client.results import BatchEvent, Event, Generated, Load, Model, Rendered, Score
from serve.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    models_pb2,
    models_pb2_grpc,
    tokenizer_pb2,
    tokenizer_pb2_grpc,
)

T = TypeVar("T")


class EventStream(Iterator[Event]):
    """Events of one request. Leaving it, by ``close``, ``with`` or by dropping it, cancels the request."""

    def __init__(self, start: Callable[[], Any], attempts: Attempts, address: str) -> None:
        self.request_id = ""
        """Known from the first event on."""
        self._start = start
        self._attempts = attempts
        self._address = address
        self._call: Any = start()
        self._has_begun = False

    def __next__(self) -> Event:
        """
        Raises:
            TesseraError: the request failed. It was tried again only if nothing had come yet.
        """
        while True:
            try:
                message = next(self._call)
            except grpc.RpcError as error:
                failure = from_rpc_error(error, self._address)
                if self._has_begun:
                    raise failure from error
                time.sleep(self._attempts.wait_or_raise(failure))
                self._call = self._start()
                continue
            self._has_begun = True
            self.request_id = message.request_id
            event = results.event(message)
            if isinstance(event, TesseraError):
                raise event
            if event is not None:
                return event

    def text(self) -> Iterator[str]:
        """The new text of each event, as it comes; of all sequences, so of use for one."""
        for event in self:
            if isinstance(event, results.Delta) and event.text:
                yield event.text

    def close(self) -> None:
        """Cancel the request if it has not ended."""
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # gRPC does not cancel calls that nobody holds any more; the server would go on for nobody.
        call = getattr(self, "_call", None)
        if call is not None:
            call.cancel()


class Client:
    """A connection to one server. Threads may share it.

    Every method may raise ``TesseraError``. ``timeout`` is in seconds and covers a whole call, all attempts together;
    ``None`` is the client's own, ``math.inf`` waits for ever.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        timeout: float | None = DEFAULT_TIMEOUT_SECONDS,
        retries: int = 3,
        retry_when_full: bool = False,
        **connecting: Unpack[Connecting],
    ) -> None:
        """Connect lazily: nothing is sent before the first call.

        Args:
            address: ``host:port``, ``unix:/path``, ``dns:///host:port`` or ``ipv4:a:port,b:port``; without it that of the
                environment (``TESSERA_ADDRESS``), else 127.0.0.1:50051.
            timeout: for calls that are given none; ``None`` waits for ever.
            retries: further attempts after UNAVAILABLE, while nothing of an answer has come.
            retry_when_full: wait and try again also when the server's queue is full.
            connecting: TLS, token, metadata, balancing; see ``Connecting``.

        Raises:
            ValueError: a file for TLS is not what it must be, or a token would leave this machine without TLS.
        """
        connection = Connection.of(address, connecting)
        self.address = connection.address
        self._metadata = connection.metadata
        self._affinity = connection.affinity
        self._timeout = timeout
        self._policy = RetryPolicy(retries=retries, when_full=retry_when_full)
        self._channel = connection.channel()
        self._inference = inference_pb2_grpc.InferenceStub(self._channel)
        self._tokenizer = tokenizer_pb2_grpc.TokenizerStub(self._channel)
        self._models = models_pb2_grpc.ModelsStub(self._channel)
        self._admin = admin_pb2_grpc.AdminStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; calls in flight are cancelled."""
        self._channel.close()

    def generate(
        self, prompt: Prompt, *, timeout: float | None = None, session: str = "", **options: Unpack[Options]
    ) -> Generated:
        """Generate, and return everything at the end.

        Args:
            prompt: text, token ids, or a conversation.
            timeout: seconds for the whole call, all attempts together.
            session: a name that calls share which a balancer should send to one server, for its prefix cache.
            options: see ``Options``; greedy until the model ends the text or its length is reached, if none is given.

        Raises:
            TesseraError: the request was refused or failed; ``code`` says how.
            TypeError: there is no such option, or the prompt is none.
        """
        message = generate_message(prompt, options)
        metadata = self._with_affinity(message, session)
        return results.generated(self._call(self._inference.Generate, message, timeout, metadata))

    def stream(
        self, prompt: Prompt, *, timeout: float | None = None, session: str = "", **options: Unpack[Options]
    ) -> EventStream:
        """Generate, and yield events as they come: one ``PromptInfo``, then ``Delta``s, then a ``Finish`` for each sequence.

        Arguments and errors are those of ``generate``; errors of the server are raised where the stream is read.
        """
        message, deadline = generate_message(prompt, options), self._deadline(timeout)
        metadata = self._with_affinity(message, session)

        def start() -> Any:
            return self._inference.GenerateStream(message, timeout=deadline.remaining_seconds, metadata=metadata)

        return EventStream(start, Attempts(self._policy, deadline), self.address)

    def batch(self, requests: Iterable[Request | Prompt], *, timeout: float | None = None) -> list[Generated | TesseraError]:
        """Run many requests on one call. A request that fails has its error in its place; the call itself does not raise."""
        messages = named_messages(requests)
        gathered = {message.request_id: gatherer_for(message) for message in messages}
        failure: TesseraError | None = None
        try:
            for item in self._batch_events(messages, timeout):
                if item.request_id in gathered:
                    gathered[item.request_id].add(item.event)
        except TesseraError as error:
            failure = error
        return [gathered[message.request_id].result(failure) for message in messages]

    def batch_stream(self, requests: Iterable[Request | Prompt], *, timeout: float | None = None) -> Iterator[BatchEvent]:
        """Run many requests on one call, and yield their events as they come. Requests are told apart by request_id."""
        return self._batch_events(named_messages(requests), timeout)

    def _batch_events(self, messages: list[inference_pb2.GenerateRequest], timeout: float | None) -> Iterator[BatchEvent]:
        left = self._deadline(timeout).remaining_seconds
        call = self._inference.GenerateBatch(iter(messages), timeout=left, metadata=self._metadata)
        try:
            for message in call:
                event = results.event(message)
                if event is not None:
                    yield BatchEvent(message.request_id, event)
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.address) from error
        finally:
            call.cancel()

    def score(
        self,
        items: Sequence[ScoreItem | str],
        *,
        top_logprobs: int | None = None,
        special_tokens: bool | None = None,
        request_id: str = "",
        model: str = "",
        priority: int | None = None,
        cache_salt: str | None = None,
        timeout: float | None = None,
    ) -> list[Score]:
        """Log-likelihoods of texts or ids, one ``Score`` an item, in order; nothing is generated.

        Args:
            items: scored independently of each other.
            top_logprobs: also the k likeliest tokens at each place; 0 asks for none beside the token itself.
            special_tokens, request_id, model, priority, cache_salt: as in ``Options``.
        """
        message = score_message(
            items,
            request_id=request_id,
            model=model,
            top_logprobs=top_logprobs,
            special_tokens=special_tokens,
            priority=priority,
            cache_salt=cache_salt,
        )
        return [results.score(result) for result in self._call(self._inference.Score, message, timeout).results]

    def tokenize(self, text: str, *, special_tokens: bool | None = None, timeout: float | None = None) -> tuple[int, ...]:
        """Token ids of a text, as a prompt would have them."""
        message = filled(tokenizer_pb2.TokenizeRequest(special_tokens=special_tokens_value(special_tokens)), text=text)
        return tuple(self._call(self._tokenizer.Tokenize, message, timeout).token_ids)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True, timeout: float | None = None) -> str:
        """The text of token ids, by default without special tokens."""
        message = filled(tokenizer_pb2.DetokenizeRequest(skip_special_tokens=skip_special_tokens), token_ids=token_ids)
        return str(self._call(self._tokenizer.Detokenize, message, timeout).text)

    def render_chat(
        self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool | None = None, timeout: float | None = None
    ) -> Rendered:
        """The prompt that a conversation becomes."""
        message = tokenizer_pb2.RenderChatRequest(chat=chat_message(messages, add_generation_prompt))
        return results.rendered(self._call(self._tokenizer.RenderChat, message, timeout))

    def models(self, *, timeout: float | None = None) -> list[Model]:
        """The served models: one."""
        answer = self._call(self._models.ListModels, models_pb2.ListModelsRequest(), timeout)
        return [results.model(message) for message in answer.models]

    def load(self, *, timeout: float | None = None) -> Load:
        """How busy the server is. Needs the Admin service on this address."""
        return results.load(self._call(self._admin.GetLoad, admin_pb2.GetLoadRequest(), timeout))

    def abort(self, request_id: str, *, timeout: float | None = None) -> None:
        """End a live request, whoever started it. Needs the Admin service on this address."""
        self._call(self._admin.Abort, filled(admin_pb2.AbortRequest(), request_id=request_id), timeout)

    def flush_prefix_cache(self, *, timeout: float | None = None) -> int:
        """Forget cached prompt prefixes; returns how many blocks held one. Needs the Admin service on this address."""
        return int(self._call(self._admin.FlushPrefixCache, admin_pb2.FlushPrefixCacheRequest(), timeout).blocks)

    def drain(self, *, timeout: float | None = None) -> None:
        """Have the server take nothing new for good, and return when what is in flight has ended. Needs the Admin service."""
        self._call(self._admin.Drain, admin_pb2.DrainRequest(), timeout)

    def reload(self, *, timeout: float | None = None) -> None:
        """Have the server serve what its model's folder holds by now; returns when it does. Needs the Admin service.

        Raises:
            TesseraError: FAILED_PRECONDITION, with the reason; what was served before goes on.
        """
        self._call(self._admin.Reload, admin_pb2.ReloadRequest(), timeout)

    def profile(
        self, steps: int = 10, *, ranks: Sequence[int] = (), seconds: int = 60, timeout: float | None = None
    ) -> dict[int, bytes]:
        """Have ranks record their next steps with torch's profiler; returns each one's trace. Needs the Admin service.

        A trace is Chrome's JSON, compressed by gzip: for a file ``NAME.json.gz``, which https://ui.perfetto.dev or
        ``chrome://tracing`` opens. Nothing is tried again.

        Args:
            steps: how many, 100 at most.
            ranks: which; all of them without.
            seconds: the recording ends then, however many steps there were; 600 at most.

        Raises:
            TesseraError: FAILED_PRECONDITION, another recording goes on; DEADLINE_EXCEEDED, nothing was asked of the server
                meanwhile; UNAVAILABLE, a rank died.
        """
        message = filled(admin_pb2.ProfileRequest(steps=steps, seconds=seconds), ranks=ranks)
        left, traces = self._deadline(timeout).remaining_seconds, dict[int, bytes]()
        try:
            for part in self._admin.Profile(message, timeout=left, metadata=self._metadata):
                results.trace_parts(traces, part)
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.address) from error
        return traces

    def is_serving(self, *, timeout: float = 5.0) -> bool:
        """Whether the server would take a request now; False also when there is none."""
        try:
            answer = self._health.Check(health_pb2.HealthCheckRequest(), timeout=timeout, metadata=self._metadata)
        except grpc.RpcError:
            return False
        return bool(answer.status == SERVING)

    def wait_until_serving(self, timeout: float = 60.0) -> None:
        """Return as soon as the server serves.

        Raises:
            TesseraError: DEADLINE_EXCEEDED, it does not within ``timeout`` seconds.
        """
        deadline = Deadline(timeout)
        while not self.is_serving(timeout=min(1.0, deadline.remaining_seconds or 0.001)):
            if not deadline.allows(0.1):
                raise not_serving_in_time()
            time.sleep(0.1)

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline(self._timeout if timeout is None else timeout)

    def _with_affinity(self, message: inference_pb2.GenerateRequest, session: str) -> Metadata | None:
        return (*(self._metadata or ()), *affinity_of(message, session, by_prompt=self._affinity)) or None

    def _call(self, method: Any, message: Message, timeout: float | None, metadata: Metadata | None = None) -> Any:
        deadline = self._deadline(timeout)
        attempts = Attempts(self._policy, deadline)
        while True:
            try:
                return method(message, timeout=deadline.remaining_seconds, metadata=metadata or self._metadata)
            except grpc.RpcError as error:
                time.sleep(attempts.wait_or_raise(from_rpc_error(error, self.address)))
