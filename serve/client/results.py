"""What comes back, as frozen values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from serve.client.errors import TesseraError, from_batch_error
from serve.v1 import admin_pb2, inference_pb2, models_pb2, tokenizer_pb2, types_pb2


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of one token, before penalties and temperature."""

    token_id: int
    logprob: float | None
    """``None`` for a prompt's first token, which nothing predicts."""
    rank: int
    """1 for the likeliest token of the vocabulary; 0 if it was not computed."""
    top: tuple[tuple[int, float], ...]
    """The likeliest (token id, logprob), best first."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one sequence."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds since the request arrived at the server."""

    queue_seconds: float
    first_token_seconds: float
    total_seconds: float


@dataclass(frozen=True, slots=True)
class PromptInfo:
    """First event of a stream."""

    prompt_tokens: int
    cached_tokens: int
    logprobs: tuple[TokenLogprob, ...]
    text: str
    """With ``echo``."""
    token_ids: tuple[int, ...]
    """With ``echo``."""


@dataclass(frozen=True, slots=True)
class Delta:
    """New output of one sequence."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Finish:
    """Last event of one sequence."""

    index: int
    reason: str
    """``length``, ``eos``, ``stop_string`` or ``stop_id``."""
    matched_stop: str | int | None
    """The stop string, or the stop or end-of-text id, that ended it."""
    usage: Usage
    timings: Timings
    seed: int


Event = PromptInfo | Delta | Finish


@dataclass(frozen=True, slots=True)
class BatchEvent:
    """One event of one request of a batch."""

    request_id: str
    event: PromptInfo | Delta | Finish | TesseraError
    """An error ends its request; the others go on."""


@dataclass(frozen=True, slots=True)
class Completion:
    """All output of one sequence."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish: Finish


@dataclass(frozen=True, slots=True)
class Generated:
    """The answer to one request."""

    request_id: str
    prompt: PromptInfo
    completions: tuple[Completion, ...]

    @property
    def text(self) -> str:
        """Text of the first sequence."""
        return self.completions[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Ids of the first sequence."""
        return self.completions[0].token_ids


@dataclass(frozen=True, slots=True)
class Score:
    """Likelihood of one text."""

    tokens: tuple[TokenLogprob, ...]
    sum: float
    """Log-likelihood in nats."""
    is_greedy: bool
    """Whether every token was the likeliest at its place."""
    usage: Usage


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as the model's prompt."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Model:
    """The served model."""

    name: str
    family: str
    num_parameters: int
    vocab_size: int
    max_model_len: int
    dtype: str
    device: str
    tensor_parallel_size: int
    eos_ids: tuple[int, ...]
    checkpoint_step: int | None
    has_tokenizer: bool
    has_chat_template: bool


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the server is."""

    state: str
    """``loading``, ``serving``, ``draining``, ``down`` or ``stopped``."""
    num_running: int
    num_waiting: int
    queued_tokens: int
    kv_blocks_used: int
    kv_blocks_cached: int
    kv_blocks_total: int


def generated(message: inference_pb2.GenerateResponse) -> Generated:
    completions = tuple(
        Completion(c.index, c.text, tuple(c.token_ids), _logprobs(c.logprobs), _finish(c.finish)) for c in message.completions
    )
    return Generated(message.request_id, _prompt(message.prompt), completions)


def event(message: inference_pb2.GenerateEvent) -> PromptInfo | Delta | Finish | TesseraError | None:
    """``None`` for a kind of event that a newer server may send and this client does not know."""
    match message.WhichOneof("event"):
        case "prompt":
            return _prompt(message.prompt)
        case "delta":
            delta = message.delta
            return Delta(delta.index, delta.text, tuple(delta.token_ids), _logprobs(delta.logprobs))
        case "finish":
            return _finish(message.finish)
        case "error":
            return from_batch_error(message.error)
        case _:
            return None


def score(message: inference_pb2.ScoreResult) -> Score:
    return Score(_logprobs(message.tokens), message.sum, message.is_greedy, _usage(message.usage))


def rendered(message: tokenizer_pb2.RenderChatResponse) -> Rendered:
    return Rendered(message.text, tuple(message.token_ids))


def model(message: models_pb2.Model) -> Model:
    return Model(
        name=message.name,
        family=message.family,
        num_parameters=message.num_parameters,
        vocab_size=message.vocab_size,
        max_model_len=message.max_model_len,
        dtype=message.dtype,
        device=message.device,
        tensor_parallel_size=message.tensor_parallel_size,
        eos_ids=tuple(message.eos_ids),
        checkpoint_step=message.checkpoint_step if message.HasField("checkpoint_step") else None,
        has_tokenizer=message.has_tokenizer,
        has_chat_template=message.has_chat_template,
    )


def load(message: admin_pb2.GetLoadResponse) -> Load:
    return Load(
        state=admin_pb2.ServerState.Name(message.state).removeprefix("SERVER_STATE_").lower(),
        num_running=message.num_running,
        num_waiting=message.num_waiting,
        queued_tokens=message.queued_tokens,
        kv_blocks_used=message.kv_blocks_used,
        kv_blocks_cached=message.kv_blocks_cached,
        kv_blocks_total=message.kv_blocks_total,
    )


class Gatherer:
    """Puts the events of one request together."""

    def __init__(self, request_id: str, num_sequences: int) -> None:
        self._request_id = request_id
        self._num_sequences = num_sequences
        self._prompt: PromptInfo | None = None
        self._deltas: dict[int, list[Delta]] = {}
        self._finishes: dict[int, Finish] = {}
        self.error: TesseraError | None = None

    def add(self, item: PromptInfo | Delta | Finish | TesseraError) -> None:
        match item:
            case PromptInfo():
                self._prompt = item
            case Delta():
                self._deltas.setdefault(item.index, []).append(item)
            case Finish():
                self._finishes[item.index] = item
            case TesseraError():
                self.error = item

    def result(self, otherwise: TesseraError | None = None) -> Generated | TesseraError:
        """The whole answer, or how the request failed.

        Args:
            otherwise: what to say of a request that had no end because its call had none.
        """
        if self.error is not None:
            return self.error
        if self._prompt is None or len(self._finishes) < self._num_sequences:
            return otherwise or TesseraError("INTERNAL", "the server ended the call without ending this request")
        return Generated(self._request_id, self._prompt, tuple(map(self._completion, sorted(self._finishes))))

    def _completion(self, index: int) -> Completion:
        deltas = self._deltas.get(index, [])
        return Completion(
            index=index,
            text="".join(delta.text for delta in deltas),
            token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
            logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
            finish=self._finishes[index],
        )


def gatherer_for(message: inference_pb2.GenerateRequest) -> Gatherer:
    """What will gather the events of this request."""
    sampling = message.sampling
    return Gatherer(message.request_id, sampling.num_sequences if sampling.HasField("num_sequences") else 1)


def _prompt(message: inference_pb2.PromptInfo) -> PromptInfo:
    return PromptInfo(
        message.prompt_tokens, message.cached_tokens, _logprobs(message.logprobs), message.text, tuple(message.token_ids)
    )


def _finish(message: inference_pb2.Finish) -> Finish:
    stop = message.WhichOneof("matched_stop")
    matched: str | int | None = getattr(message, stop) if stop is not None else None
    timings = Timings(message.timings.queue_seconds, message.timings.first_token_seconds, message.timings.total_seconds)
    return Finish(message.index, _reason(message.reason), matched, _usage(message.usage), timings, message.seed)


def _reason(number: int) -> str:
    known = types_pb2.FinishReason.values()
    name = types_pb2.FinishReason.Name(number) if number in known else str(number)
    return name.removeprefix("FINISH_REASON_").lower()


def _usage(message: types_pb2.Usage) -> Usage:
    return Usage(message.prompt_tokens, message.cached_tokens, message.completion_tokens)


def _logprobs(messages: Iterable[types_pb2.TokenLogprob]) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(
            m.token_id,
            m.logprob if m.HasField("logprob") else None,
            m.rank,
            tuple((top.token_id, top.logprob) for top in m.top),
        )
        for m in messages
    )
