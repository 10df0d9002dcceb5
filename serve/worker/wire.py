"""Plans, results and configuration as bytes: msgpack arrays with a length before them. Never pickle."""

from __future__ import annotations

import socket
import struct
from dataclasses import fields, is_dataclass
from typing import Any, Final, get_args, get_origin, get_type_hints

import msgpack

from serve.engine.plan import PromptLogprobs, Sampled, SequenceFault, Span, Start, StepPlan, StepResult
from serve.types import SamplingParams, TokenLogprob

_LENGTH: Final = struct.Struct("!I")
MAX_MESSAGE_BYTES: Final = 1 << 30


class ConnectionLost(Exception):
    """The other side closed its end, or died."""


def send(connection: socket.socket, payload: bytes) -> None:
    """Send one message, whole.

    Raises:
        ConnectionLost: the other side is gone.
    """
    try:
        connection.sendall(_LENGTH.pack(len(payload)) + payload)
    except OSError as error:
        raise ConnectionLost(str(error)) from error


def receive(connection: socket.socket) -> bytes:
    """Receive one message, whole.

    Raises:
        ConnectionLost: the other side is gone, or sent a length beyond any message's.
    """
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    if length > MAX_MESSAGE_BYTES:
        raise ConnectionLost(f"a message of {length} bytes was announced; at most {MAX_MESSAGE_BYTES} are allowed")
    return _exactly(connection, length)


def _exactly(connection: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        try:
            part = connection.recv(min(count - len(parts), 1 << 20))
        except OSError as error:
            raise ConnectionLost(str(error)) from error
        if not part:
            raise ConnectionLost("the other side closed its end")
        parts += part
    return bytes(parts)


def _fields(value: Any, kind: type) -> list[Any]:
    return [getattr(value, field.name) for field in fields(kind)]


def encode_plan(plan: StepPlan) -> bytes:
    """A plan as bytes."""
    starts = [[*_fields(start, Start)] for start in plan.starts]
    for packed, start in zip(starts, plan.starts, strict=True):
        packed[_SAMPLING_AT] = _fields(start.sampling, SamplingParams)
    spans = [(s.sequence, s.start, s.count, s.new_tokens, s.new_blocks, s.sample) for s in plan.spans]
    return _pack([plan.step, starts, spans, plan.dropped])


def decode_plan(payload: bytes) -> StepPlan:
    """The plan that ``encode_plan`` packed."""
    step, starts, spans, dropped = msgpack.unpackb(payload, use_list=False)
    return StepPlan(
        step=step,
        starts=tuple(_start(values) for values in starts),
        spans=tuple(
            Span(sequence=q, start=p, count=n, new_tokens=t, new_blocks=b, sample=last) for q, p, n, t, b, last in spans
        ),
        dropped=dropped,
    )


_SAMPLING_AT: Final = [field.name for field in fields(Start)].index("sampling")
_START_NAMES: Final = tuple(field.name for field in fields(Start))
_SAMPLING_NAMES: Final = tuple(field.name for field in fields(SamplingParams))


def _start(values: tuple[Any, ...]) -> Start:
    named = dict(zip(_START_NAMES, values, strict=True))
    named["sampling"] = SamplingParams(**dict(zip(_SAMPLING_NAMES, named["sampling"], strict=True)))
    return Start(**named)


def encode_result(result: StepResult) -> bytes:
    """A result as bytes."""
    return _pack(
        [
            result.step,
            [(s.sequence, s.token_id, _logprob(s.logprob)) for s in result.sampled],
            [(p.sequence, p.first, [_logprob(value) for value in p.logprobs]) for p in result.prompt_logprobs],
            [(f.sequence, f.message, f.not_finite) for f in result.faults],
        ]
    )


def decode_result(payload: bytes) -> StepResult:
    """The result that ``encode_result`` packed."""
    step, sampled, prompts, faults = msgpack.unpackb(payload, use_list=False)
    return StepResult(
        step=step,
        sampled=tuple(Sampled(sequence=q, token_id=t, logprob=TokenLogprob(*p) if p else None) for q, t, p in sampled),
        prompt_logprobs=tuple(
            PromptLogprobs(sequence=q, first=first, logprobs=tuple(TokenLogprob(*p) for p in values))
            for q, first, values in prompts
        ),
        faults=tuple(SequenceFault(sequence=q, message=message, not_finite=bad) for q, message, bad in faults),
    )


def _logprob(value: TokenLogprob | None) -> tuple[Any, ...] | None:
    return None if value is None else (value.token_id, value.logprob, value.rank, value.top)


def _pack(value: Any) -> bytes:
    return msgpack.packb(value)  # type: ignore[no-any-return]


def encode_record(value: Any) -> bytes:
    """A dataclass of plain values and further dataclasses (``ServerConfig``, ``ModelFacts``) as bytes."""
    return _pack(_plain(value))


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    return value


def decode_record(payload: bytes, kind: type) -> Any:
    """The dataclass that ``encode_record`` packed; its own checks run again."""
    return _record(msgpack.unpackb(payload, use_list=False), kind)


def _record(value: Any, kind: Any) -> Any:
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return kind(**{name: _record(item, hints[name]) for name, item in value.items()})  # type: ignore[operator]
    if get_origin(kind) is tuple and value is not None:
        assert get_args(kind)
        return tuple(value)
    return value
