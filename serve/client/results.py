"""What comes back, as frozen values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

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
    """Special tokens included."""
    cached_tokens: int
    """Tokens of the prompt whose keys and values came from the prefix cache."""
    completion_tokens: int
    """Tokens generated, the one that ended the sequence included."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds since the request arrived at the server."""

    queue_seconds: float
    """Until the first step that computed anything for the request."""
    first_token_seconds: float
    total_seconds: float


@dataclass(frozen=True, slots=True)
class PromptInfo:
    """First event of a stream: the prompt is computed."""

    prompt_tokens: int
    """Special tokens included."""
    cached_tokens: int
    """Tokens of the prompt whose keys and values came from the prefix cache."""
    logprobs: tuple[TokenLogprob, ...]
    """One for each token of the prompt; empty without ``prompt_logprobs``."""
    text: str
    """The prompt as text; empty without ``echo``."""
    token_ids: tuple[int, ...]
    """The prompt's ids; empty without ``echo``."""


@dataclass(frozen=True, slots=True)
class Delta:
    """New output of one sequence."""

    index: int
    """Which of the request's sequences, from 0."""
    text: str
    """Whole characters only. It may come later than its ids: parts of characters and possible stop strings are held back."""
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    """One for each id; empty without ``logprobs``."""


@dataclass(frozen=True, slots=True)
class MadeBy:
    """The weights that made the tokens of a sequence from one on."""

    first_token: int
    """Counted from 0 at the first generated one."""
    checkpoint_step: int | None
    """Training step of their checkpoint; ``None`` where it is not recorded."""


@dataclass(frozen=True, slots=True)
class Finish:
    """Last event of one sequence."""

    index: int
    """Which of the request's sequences, from 0."""
    reason: str
    """``length``, ``eos``, ``stop_string`` or ``stop_id``."""
    matched_stop: str | int | None
    """The stop string, or the stop or end-of-text id, that ended it."""
    usage: Usage
    timings: Timings
    seed: int
    """The request's, or the one that the server drew."""
    checkpoint_step: int | None = None
    """Training step of the checkpoint that made the last token; ``None`` where it is not recorded."""
    made_by: tuple[MadeBy, ...] = ()
    """What made the tokens, in order: more than one where the server took newer weights meanwhile."""
    proposed_tokens: int = 0
    """Tokens that the server guessed and the model verified."""
    accepted_tokens: int = 0
    """Guessed tokens that became output: so many steps were saved."""


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
    """Which of the request's sequences, from 0."""
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    """One for each id; empty without ``logprobs``."""
    finish: Finish


@dataclass(frozen=True, slots=True)
class Generated:
    """The answer to one request."""

    request_id: str
    prompt: PromptInfo
    completions: tuple[Completion, ...]
    """One for each sequence, by index."""

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
    """One for each token of the target; the first of an item without context has no log probability."""
    sum: float
    """Log-likelihood of the target in nats."""
    is_greedy: bool
    """Whether every scored token was the likeliest at its place."""
    usage: Usage
    """Tokens of context and target together."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as the model's prompt."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What a request may ask for at most; more is INVALID_ARGUMENT."""

    num_sequences: int
    logprobs: int
    """The largest value of ``logprobs``, and of ``prompt_logprobs``."""
    stop_strings: int
    stop_string_bytes: int
    """UTF-8 bytes of one stop string."""
    stop_ids: int
    logit_bias: int
    """Entries."""
    prompt_bytes: int
    """UTF-8 bytes of a text prompt."""
    score_items: int
    """Items that one ``score`` call may have."""


@dataclass(frozen=True, slots=True)
class Model:
    """What the server says of the model that it serves."""

    name: str
    """The name that requests give."""
    family: str
    """Architecture, for example ``gpt_neox``."""
    num_parameters: int
    """Tied ones counted once."""
    vocab_size: int
    """Token ids lie in [0, vocab_size)."""
    max_model_len: int
    """Positions a sequence may have, prompt and output together."""
    dtype: str
    """The type of weights, activations and cache, for example ``bfloat16``."""
    device: str
    """``cpu`` or ``cuda``."""
    tensor_parallel_size: int
    """Processes that share every layer."""
    eos_ids: tuple[int, ...]
    """Token ids that end a text."""
    checkpoint_step: int | None
    """Training step of the checkpoint; ``None`` where it is not recorded."""
    has_tokenizer: bool
    """Whether text prompts, text output, ``tokenize`` and ``detokenize`` work."""
    has_chat_template: bool
    """Whether conversations and ``render_chat`` work."""
    limits: RequestLimits
    pipeline_parallel_size: int = 1
    """Stages that share the layers, one after another, each of ``tensor_parallel_size`` processes."""


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the server is."""

    state: str
    """``loading``, ``serving``, ``draining``, ``down`` or ``stopped``."""
    num_running: int
    """Sequences that are being computed."""
    num_waiting: int
    """Requests that wait for their first step."""
    queued_tokens: int
    """Prompt tokens of the waiting requests."""
    kv_blocks_used: int
    """KV blocks that live sequences hold."""
    kv_blocks_cached: int
    """KV blocks that hold nothing but a cached prefix."""
    kv_blocks_total: int
    max_num_seqs: int
    """Limit of ``num_running``."""
    max_queued_requests: int
    """Limit of ``num_waiting``."""
    max_queued_tokens: int
    """Limit of ``queued_tokens``."""


def generated(message: inference_pb2.GenerateResponse) -> Generated:
    """The whole answer to one request."""
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
    """The likelihood of one item."""
    return Score(_logprobs(message.tokens), message.sum, message.is_greedy, _usage(message.usage))


def rendered(message: tokenizer_pb2.RenderChatResponse) -> Rendered:
    """A conversation's prompt."""
    return Rendered(message.text, tuple(message.token_ids))


def model(message: models_pb2.Model) -> Model:
    """What is said of one served model."""
    return Model(
        name=message.name,
        family=message.family,
        num_parameters=message.num_parameters,
        vocab_size=message.vocab_size,
        max_model_len=message.max_model_len,
        dtype=message.dtype,
        device=message.device,
        tensor_parallel_size=message.tensor_parallel_size,
        pipeline_parallel_size=message.pipeline_parallel_size or 1,  # a server of an older release says nothing
        eos_ids=tuple(message.eos_ids),
        checkpoint_step=_step(message),
        has_tokenizer=message.has_tokenizer,
        has_chat_template=message.has_chat_template,
        limits=RequestLimits(**{field.name: getattr(message.limits, field.name) for field in fields(RequestLimits)}),
    )


def trace_parts(traces: dict[int, bytes], message: admin_pb2.ProfilePart) -> None:
    """Add a piece to its rank's trace."""
    traces[message.rank] = traces.get(message.rank, b"") + message.data


def load(message: admin_pb2.GetLoadResponse) -> Load:
    """How busy the server says it is."""
    return Load(
        state=admin_pb2.ServerState.Name(message.state).removeprefix("SERVER_STATE_").lower(),
        num_running=message.num_running,
        num_waiting=message.num_waiting,
        queued_tokens=message.queued_tokens,
        kv_blocks_used=message.kv_blocks_used,
        kv_blocks_cached=message.kv_blocks_cached,
        kv_blocks_total=message.kv_blocks_total,
        max_num_seqs=message.max_num_seqs,
        max_queued_requests=message.max_queued_requests,
        max_queued_tokens=message.max_queued_tokens,
    )


def _prompt(message: inference_pb2.PromptInfo) -> PromptInfo:
    return PromptInfo(
        message.prompt_tokens, message.cached_tokens, _logprobs(message.logprobs), message.text, tuple(message.token_ids)
    )


def _finish(message: inference_pb2.Finish) -> Finish:
    stop = message.WhichOneof("matched_stop")
    matched: str | int | None = getattr(message, stop) if stop is not None else None
    timings = Timings(message.timings.queue_seconds, message.timings.first_token_seconds, message.timings.total_seconds)
    return Finish(
        message.index,
        _reason(message.reason),
        matched,
        _usage(message.usage),
        timings,
        message.seed,
        _step(message),
        tuple(MadeBy(part.first_token, _step(part)) for part in message.made_by),
        message.proposed_tokens,
        message.accepted_tokens,
    )


def _step(message: inference_pb2.Finish | inference_pb2.MadeBy | models_pb2.Model) -> int | None:
    return message.checkpoint_step if message.HasField("checkpoint_step") else None


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
