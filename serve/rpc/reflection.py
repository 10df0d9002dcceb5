"""Server reflection, v1 and v1alpha: tools such as grpcurl learn the services from the server itself.

Both versions have the same messages under two package names, so one servicer answers for both.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any, Final

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.descriptor import FileDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import _async as aio
from grpc_reflection.v1alpha import reflection_pb2

from serve.rpc.context import Context
from serve.rpc.decoding import Malformed
from serve.rpc.methods import Calls, bind
from serve.v1 import admin_pb2, inference_pb2, models_pb2, tokenizer_pb2

V1ALPHA: Final = "grpc.reflection.v1alpha.ServerReflection"
V1: Final = "grpc.reflection.v1.ServerReflection"
_DESCRIBED: Final = (inference_pb2, tokenizer_pb2, models_pb2, admin_pb2, health_pb2, reflection_pb2)


def reflection_handlers(
    services: Iterable[str], calls: Calls, most_waiting_bytes: int
) -> list[grpc.GenericRpcHandler[Any, Any]]:
    """``grpc.GenericRpcHandler``s of both versions, listing ``services`` and themselves; the rest as for ``bind``."""
    servicer = _Reflection(aio.ReflectionServicer([*services, V1, V1ALPHA], pool=_pool()))
    service = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]
    return [
        bind(service, servicer, None, bounds={}, most_waiting_bytes=most_waiting_bytes, calls=calls, name=name)
        for name in (V1, V1ALPHA)
    ]


class _Reflection:
    """gRPC's own servicer, which knows nothing of requests that could not be read."""

    def __init__(self, servicer: Any) -> None:
        self._servicer = servicer

    async def ServerReflectionInfo(self, requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
        """Answers questions about services and their messages."""

        async def readable() -> AsyncIterator[Any]:
            async for request in requests:
                if isinstance(request, Malformed):
                    raise request.error
                yield request

        async for answer in self._servicer.ServerReflectionInfo(readable(), context):
            yield answer


def _pool() -> descriptor_pool.DescriptorPool:
    """A pool of the server's own: the process's may hold another version of the reflection files."""
    pool = descriptor_pool.DescriptorPool()
    added: set[str] = set()
    for module in _DESCRIBED:
        _add(pool, module.DESCRIPTOR, added)
    proto = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(proto)
    _rename(proto)
    pool.Add(proto)
    return pool


def _rename(proto: descriptor_pb2.FileDescriptorProto) -> None:
    """Turn the description of v1alpha into that of v1."""
    proto.name = "grpc/reflection/v1/reflection.proto"
    proto.package = "grpc.reflection.v1"
    for message in proto.message_type:
        for field in message.field:
            if field.type_name:
                field.type_name = field.type_name.replace(".v1alpha.", ".v1.")
    for service in proto.service:
        for method in service.method:
            method.input_type = method.input_type.replace(".v1alpha.", ".v1.")
            method.output_type = method.output_type.replace(".v1alpha.", ".v1.")


def _add(pool: descriptor_pool.DescriptorPool, file: FileDescriptor, added: set[str]) -> None:
    if file.name in added:
        return
    added.add(file.name)
    for dependency in file.dependencies:
        _add(pool, dependency, added)
    proto = descriptor_pb2.FileDescriptorProto()
    file.CopyToProto(proto)
    pool.Add(proto)
