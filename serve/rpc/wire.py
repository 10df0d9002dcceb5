"""Bytes to request messages, without ever failing inside gRPC.

A message that protobuf cannot read would end its call with INTERNAL and no word about the cause. Here it becomes a
``Malformed`` value, so that the handler's wrapper answers INVALID_ARGUMENT and names the field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, cast

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor
from google.protobuf.message import DecodeError, Message

from serve.errors import InvalidRequest

_FieldProto: Final = descriptor_pb2.FieldDescriptorProto


@dataclass(frozen=True, slots=True)
class Malformed:
    """What came instead of a message."""

    error: InvalidRequest
    request_id: str
    """The request_id, where there was one that could be read; else empty."""


def decoder(message_class: type[Message]) -> Callable[[bytes], Message | Malformed]:
    """A deserializer for gRPC that returns a ``Malformed`` where the bytes are no such message."""

    def decode(data: bytes) -> Message | Malformed:
        try:
            return message_class.FromString(data)
        except DecodeError:
            return _explain(cast(Descriptor, message_class.DESCRIPTOR), data)

    return decode


def _explain(descriptor: Descriptor, data: bytes) -> Malformed:
    """Read the message again with every string as bytes, and find those that are not UTF-8."""
    lenient = _lenient_class(descriptor)()
    try:
        lenient.ParseFromString(data)
    except DecodeError:
        return Malformed(InvalidRequest.of("request", f"these bytes are not a {descriptor.full_name} message"), "")
    texts = dict(_texts(lenient, descriptor))
    for path, value in texts.items():
        try:
            value.decode()
        except UnicodeDecodeError as error:
            rule = f"byte {error.start} is not valid UTF-8"
            return Malformed(InvalidRequest.of(path, rule), texts.get("request_id", b"").decode(errors="ignore"))
    return Malformed(InvalidRequest.of("request", f"these bytes are not a {descriptor.full_name} message"), "")


def _texts(message: Any, strict: Descriptor) -> Iterator[tuple[str, bytes]]:
    """(path, bytes) of every field of ``message`` that ``strict`` declares as a string."""
    for field, value in message.ListFields():
        declared = strict.fields_by_name[field.name]
        if declared.type == FieldDescriptor.TYPE_STRING:
            values = (
                [(field.name, value)] if not declared.is_repeated else [(f"{field.name}[{i}]", v) for i, v in enumerate(value)]
            )
            yield from values
        elif declared.message_type is not None and not declared.message_type.GetOptions().map_entry:
            many = [(f"{field.name}[{i}]", v) for i, v in enumerate(value)] if declared.is_repeated else [(field.name, value)]
            for path, inner in many:
                for inner_path, text in _texts(inner, declared.message_type):
                    yield f"{path}.{inner_path}", text


@cache
def _lenient_class(descriptor: Descriptor) -> type[Message]:
    pool = descriptor_pool.DescriptorPool()
    _add_lenient(pool, descriptor.file, set())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(descriptor.full_name))


def _add_lenient(pool: Any, file: FileDescriptor, added: set[str]) -> None:
    if file.name in added:
        return
    added.add(file.name)
    for dependency in file.dependencies:
        _add_lenient(pool, dependency, added)
    proto = descriptor_pb2.FileDescriptorProto()
    file.CopyToProto(proto)
    for message in proto.message_type:
        for field in message.field:
            if field.type == _FieldProto.TYPE_STRING:
                field.type = _FieldProto.TYPE_BYTES
    pool.Add(proto)
