"""Random requests, as bytes: fields in extremes, bytes mutated, sizes to the limit. Everything follows from the seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, Final

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import EncodeError
from grpc_reflection.v1alpha import reflection_pb2

from serve.v1 import admin_pb2, inference_pb2, models_pb2, tokenizer_pb2

LIMIT_BYTES: Final = 8 * 1024 * 1024
LEFT_OUT: Final = ("Drain", "Reload")
"""Calls that are meant to stop the service."""

METHODS: Final = [
    method
    for file in (inference_pb2, tokenizer_pb2, models_pb2, admin_pb2, reflection_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    if method.name not in LEFT_OUT
]

_WORDS: Final = ("", "x", "user", "fake", "a b c", "🙂é\u0000", "\n" * 40, "<|endoftext|>", "x" * 300)
_SPECIAL: Final = (0, 1, 2, 5, 20, 21, 64, 127, 128, 255, 256, 299, 300, 4096, 65_536)
_FLOATS: Final = (0.0, -0.0, 1.0, 0.5, 1e-30, -1.0, 100.0, 3.4e38, float("inf"), float("-inf"), float("nan"))


def random_messages(seed: int, number: int) -> Iterator[tuple[str, bytes]]:
    """``number`` pairs of a method's path and what is sent to it, at most ``LIMIT_BYTES`` long; one in 50 is megabytes."""
    rng = random.Random(seed)
    for _ in range(number):
        method = rng.choice(METHODS)
        path = f"/{method.containing_service.full_name}/{method.name}"
        data = _message(rng, method.input_type)
        change = rng.choices((_unchanged, _mutated, _cut, _repeated, _noise, _large), (40, 25, 5, 10, 18, 2))[0]
        yield path, change(rng, data)[:LIMIT_BYTES]


def _message(rng: random.Random, descriptor: Descriptor) -> bytes:
    message = message_factory.GetMessageClass(descriptor)()
    _fill(rng, message, depth=0)
    try:
        return bytes(message.SerializeToString())
    except EncodeError:  # half a character; what is left makes a message too
        return b""


def _fill(rng: random.Random, message: Any, depth: int) -> None:
    for field in message.DESCRIPTOR.fields:
        if rng.random() < 0.5:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            for _ in range(_size(rng)):
                getattr(message, field.name)[rng.choice(_SPECIAL)] = rng.choice(_FLOATS)
        elif field.is_repeated:
            values = getattr(message, field.name)
            for _ in range(_size(rng) if depth < 3 else 1):
                if field.message_type is not None:
                    _fill(rng, values.add(), depth + 1)
                else:
                    values.append(_value(rng, field))
        elif field.message_type is not None:
            inner = getattr(message, field.name)
            inner.SetInParent()
            _fill(rng, inner, depth + 1)
        else:
            setattr(message, field.name, _value(rng, field))


def _size(rng: random.Random) -> int:
    return rng.choice((0, 1, 1, 2, 3, 17, 65))


def _value(rng: random.Random, field: FieldDescriptor) -> Any:
    match field.type:
        case FieldDescriptor.TYPE_STRING:
            return rng.choice(_WORDS) * rng.choice((1, 1, 1, 3))
        case FieldDescriptor.TYPE_BOOL:
            return rng.random() < 0.5
        case FieldDescriptor.TYPE_FLOAT | FieldDescriptor.TYPE_DOUBLE:
            return rng.choice(_FLOATS)
        case FieldDescriptor.TYPE_INT32 | FieldDescriptor.TYPE_ENUM:
            return rng.choice((*_SPECIAL, -1, 2**31 - 1, -(2**31)))
        case FieldDescriptor.TYPE_UINT64:
            return rng.choice((*_SPECIAL, 2**64 - 1))
        case _:
            return rng.choice((*_SPECIAL, 2**31, 2**32 - 1))


Change = Callable[[random.Random, bytes], bytes]


def _unchanged(rng: random.Random, data: bytes) -> bytes:
    return data


def _mutated(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        if changed:
            changed[rng.randrange(len(changed))] = rng.choice((0, 0x7F, 0x80, 0xFF, rng.randrange(256)))
    return bytes(changed)


def _cut(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randint(0, len(data))]


def _repeated(rng: random.Random, data: bytes) -> bytes:
    return data * rng.choice((2, 10, 100))


def _noise(rng: random.Random, data: bytes) -> bytes:
    return rng.randbytes(rng.choice((1, 3, 20, 300)))


def _large(rng: random.Random, data: bytes) -> bytes:
    """A field that stands again and again, at the top or in another, up to a random size."""
    number, length = rng.randint(1, 13), rng.choice((0, 1, 3, 20, 1000))
    unit = _field(number, rng.randbytes(length) if rng.random() < 0.3 else b"\x08\x05" * (length // 2))
    payload = unit * (rng.choice((LIMIT_BYTES, LIMIT_BYTES // 4, 100_000)) // len(unit))
    return (payload if rng.random() < 0.5 else _field(rng.randint(1, 11), payload[: -len(unit) * 4])) + data[:8]


def _field(number: int, payload: bytes) -> bytes:
    size, length = len(payload), bytearray()
    while size > 127:
        length.append(size & 127 | 128)
        size >>= 7
    return bytes([number << 3 | 2, *length, size]) + payload
