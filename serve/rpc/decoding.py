"""Bytes to request messages, without ever failing inside gRPC and without keeping the event loop.

A message that protobuf cannot read would end its call with INTERNAL and no word about the cause. Here it becomes a
``Malformed`` value, so that the handler's wrapper answers INVALID_ARGUMENT and names the field. gRPC reads messages on the
event loop: a large one passes as its bytes, which are counted, parsed and if need be explained in a thread. Where too many
bytes wait for that, it is refused unread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, cast

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor
from google.protobuf.message import DecodeError, Message

from serve.errors import InvalidRequest, QueueFull, RequestError
from serve.rpc.bounds import Census
from serve.rpc.threads import INLINE_BYTES, in_message_thread

_FieldProto: Final = descriptor_pb2.FieldDescriptorProto

_HEAD_BYTES: Final = 4096
"""Where the name of a message is looked for that is not read: clients write fields by number, and the name has the first."""


@dataclass(frozen=True, slots=True)
class Malformed:
    """What came instead of a message."""

    error: RequestError
    request_id: str
    """The request_id, where there was one that could be read; else empty."""


class Unread:
    """A large message that is still to be read, once."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    @property
    def num_bytes(self) -> int:
        """How long it is."""
        return len(self._data)

    def take(self) -> bytes:
        """The bytes, which are let go: an error's traceback may hold this object for long after its call."""
        data, self._data = self._data, b""
        return data


class Reader:
    """Reads the requests of one method."""

    def __init__(
        self,
        message_class: type[Message],
        bounds: Mapping[str, int],
        *,
        most_waiting_bytes: int | None = None,
        refused: Callable[[QueueFull], None] = lambda refusal: None,
    ) -> None:
        """
        Args:
            bounds: see ``serve.rpc.bounds.request_bounds``.
            most_waiting_bytes: of large messages that wait to be read, those of other methods included; ``None``: any number.
            refused: told of each that there was no room for.
        """
        self._message_class = message_class
        self._most_waiting_bytes = most_waiting_bytes
        self._refused = refused
        self._descriptor = cast(Descriptor, message_class.DESCRIPTOR)
        self._bounds = bounds

    def decode(self, data: bytes) -> Message | Malformed | Unread:
        """The deserializer for gRPC."""
        return self._parse(data) if len(data) <= INLINE_BYTES else Unread(data)

    async def read(self, request: Message | Malformed | Unread) -> Message | Malformed:
        """What ``decode`` has left to do."""
        if not isinstance(request, Unread):
            return request
        most_bytes = self._most_waiting_bytes
        try:
            return await in_message_thread(lambda: self._read_large(request.take()), request.num_bytes, most_bytes=most_bytes)
        except QueueFull as refusal:
            self._refused(refusal)
            head = Census(request.take()[:_HEAD_BYTES], self._bounds)
            head.take(self._descriptor)
            return Malformed(refusal, head.request_id)

    def _read_large(self, data: bytes) -> Message | Malformed:
        census = Census(data, self._bounds)
        violation = census.take(self._descriptor)
        if violation is not None:
            return Malformed(InvalidRequest([violation]), census.request_id)
        return self._parse(data)

    def _parse(self, data: bytes) -> Message | Malformed:
        try:
            return self._message_class.FromString(data)
        except DecodeError:
            return _explain(self._descriptor, data)


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
