"""What a request may not say: every field, with the status and the field's name; and the engine does not notice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.rpc import error_details_pb2, status_pb2

from serve.rpc.checks import Checks
from serve.rpc.status import DETAILS_KEY
from serve.v1 import inference_pb2
from tests.serve.rpc.running import RunningServer, request, serving, tokenizer

INF = float("inf")
FLOATS = (float("nan"), INF, -INF, 3.4e38, -3.4e38, 1e9, -1e9)
UNSIGNED = (2**32 - 1, 2**31, 10**8)
SIGNED = (2**31 - 1, -(2**31))

ANY_VALUE = {"sampling.seed"}
"""Fields for which every number is good."""


def violations(error: grpc.aio.AioRpcError) -> dict[str, str]:
    """Field to rule, from the status's details."""
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS_KEY:
            for detail in status_pb2.Status.FromString(value).details:
                bad = error_details_pb2.BadRequest()
                if detail.Unpack(bad):
                    return {violation.field: violation.description for violation in bad.field_violations}
    return {}


async def refusal(server: RunningServer, message: inference_pb2.GenerateRequest) -> dict[str, str]:
    """The violations of a request that must be INVALID_ARGUMENT, the same for both methods."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await server.inference.Generate(message)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, caught.value.details()
    with pytest.raises(grpc.aio.AioRpcError) as streamed:
        await server.inference.GenerateStream(message).read()
    assert streamed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert violations(streamed.value) == violations(caught.value)
    return violations(caught.value)


def numeric_fields(descriptor: Descriptor, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], FieldDescriptor]]:
    """(path, field) of every number below a message, enums and map values included."""
    for field in descriptor.fields:
        if field.message_type is not None:
            yield from numeric_fields(field.message_type, (*path, field.name))
        elif field.type not in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_BOOL):
            yield (*path, field.name), field


def bad_values(field: FieldDescriptor) -> tuple[float, ...]:
    match field.type:
        case FieldDescriptor.TYPE_FLOAT | FieldDescriptor.TYPE_DOUBLE:
            return FLOATS
        case FieldDescriptor.TYPE_ENUM:
            return (99, -1)
        case FieldDescriptor.TYPE_INT32:
            return SIGNED
        case _:
            return UNSIGNED


def put(message: Any, path: tuple[str, ...], value: float) -> None:
    *parents, name = path
    for parent in parents:
        if parent == "logit_bias":
            message.logit_bias[7 if name == "value" else int(value)] = value if name == "value" else 1.0
            return
        message = getattr(message, parent)
    if message.DESCRIPTOR.fields_by_name[name].is_repeated:
        getattr(message, name).append(int(value))
    else:
        setattr(message, name, value)


NUMERIC = [(".".join(path), path, field) for path, field in numeric_fields(inference_pb2.GenerateRequest.DESCRIPTOR)]


def test_the_walk_finds_every_kind_of_number() -> None:
    names = {name for name, _, _ in NUMERIC}
    wanted = {"sampling.temperature", "sampling.logit_bias.value", "token_ids.ids", "stopping.stop_ids", "special_tokens"}
    assert names >= wanted
    assert len(names) >= 20


async def test_no_number_that_makes_no_sense_gets_through() -> None:
    async with serving() as server:
        for name, path, field in NUMERIC:
            if name in ANY_VALUE:
                continue
            for value in bad_values(field):
                message = request(text="hi", tokens=None) if path[0] != "token_ids" else request(tokens=None)
                put(message, path, value)
                named = await refusal(server, message)
                stem = name.removesuffix(".value").removesuffix(".key")
                assert any(stem in field_name for field_name in named), (name, value, named)
        assert server.ranks.num_steps == 0
        assert len((await server.inference.Generate(request())).completions[0].token_ids) == 4


async def test_every_seed_is_good() -> None:
    async with serving() as server:
        for seed in (0, 1, 2**63, 2**64 - 1):
            answer = await server.inference.Generate(request(sampling={"seed": seed}))
            assert answer.completions[0].finish.seed == seed


BAD: list[tuple[dict[str, Any], str]] = [
    ({"text": ""}, "prompt.text"),
    ({"token_ids": {"ids": []}}, "prompt.token_ids.ids"),
    ({"chat": {"messages": []}}, "prompt.chat.messages"),
    ({"chat": {"messages": [{"role": "", "content": "x"}]}}, "prompt.chat.messages[0].role"),
    ({"chat": {"messages": [{"role": "wizard", "content": "x"}]}}, "prompt.chat"),
    ({"text": "word " * 400}, "prompt.text"),
    ({"text": "x" * 5_000_000}, "prompt.text"),
    ({"text": "x" * 8_000_000}, "prompt.text"),
    ({"chat": {"messages": [{"role": "user", "content": "x" * 5_000_000}]}}, "prompt.chat.messages"),
    ({"request_id": "with space"}, "request_id"),
    ({"request_id": "x" * 129}, "request_id"),
    ({"request_id": "a/1"}, "request_id"),
    ({"request_id": "ünï"}, "request_id"),
    ({"cache_salt": "x" * 257}, "cache_salt"),
    ({"special_tokens": 7}, "special_tokens"),
    ({"priority": 1_000_001}, "priority"),
    ({"sampling": {"top_p": 0.0}}, "sampling.top_p"),
    ({"sampling": {"top_p": 1.0001}}, "sampling.top_p"),
    ({"sampling": {"typical_p": 0.0}}, "sampling.typical_p"),
    ({"sampling": {"min_p": 1.5}}, "sampling.min_p"),
    ({"sampling": {"temperature": -0.1}}, "sampling.temperature"),
    ({"sampling": {"temperature": 1e-30}}, "sampling.temperature"),
    ({"sampling": {"repetition_penalty": 0.0}}, "sampling.repetition_penalty"),
    ({"sampling": {"num_sequences": 0}}, "sampling.num_sequences"),
    ({"sampling": {"num_sequences": 65}}, "sampling.num_sequences"),
    ({"sampling": {"allowed_ids": [5], "banned_ids": [5]}}, "sampling.allowed_ids"),
    ({"sampling": {"allowed_ids": [5]}, "stopping": {"stop_ids": [5], "min_new_tokens": 1}}, "sampling.allowed_ids"),
    ({"sampling": {"banned_ids": range(tokenizer().vocab_size)}}, "sampling.banned_ids"),
    ({"sampling": {"logit_bias": dict.fromkeys(range(1025), 1.0)}}, "sampling.logit_bias"),
    ({"stopping": {"max_new_tokens": 3, "min_new_tokens": 4}}, "stopping.min_new_tokens"),
    ({"stopping": {"max_new_tokens": 254}}, "stopping.max_new_tokens"),
    ({"stopping": {"max_new_tokens": 0}}, "stopping.max_new_tokens"),
    ({"stopping": {"stop_strings": [""]}}, "stopping.stop_strings[0]"),
    ({"stopping": {"stop_strings": ["ok", "ä" * 129]}}, "stopping.stop_strings[1]"),
    ({"stopping": {"stop_strings": ["x"] * 17}}, "stopping.stop_strings"),
    ({"stopping": {"stop_ids": [1] * 65}}, "stopping.stop_ids"),
    ({"stopping": {"stop_ids": [5, 100_000]}}, "stopping.stop_ids[1]"),
    ({"response": {"logprobs": 21}}, "response.logprobs"),
    ({"response": {"prompt_logprobs": 21}}, "response.prompt_logprobs"),
]


async def test_each_broken_rule_names_its_field() -> None:
    async with serving() as server:
        for fields, field in BAD:
            message = request(tokens=4 if "stopping" not in fields else None)
            if "token_ids" in fields:
                message.token_ids.ids.clear()
            if "text" in fields or "chat" in fields:
                message.ClearField("token_ids")
            message.MergeFrom(inference_pb2.GenerateRequest(**fields))
            assert field in await refusal(server, message), field
        assert server.ranks.num_steps == 0


async def test_the_last_good_value_of_each_limit_is_served() -> None:
    async with serving() as server:
        for fields in (
            {"stopping": {"max_new_tokens": 253}},
            {"sampling": {"num_sequences": 64, "top_k": tokenizer().vocab_size}},
            {"sampling": {"top_p": 1.0, "typical_p": 1.0, "min_p": 1.0, "temperature": 100.0}},
            {"stopping": {"stop_strings": [f"{i}" * 256 for i in range(9)], "max_new_tokens": 2}},
            {"response": {"logprobs": 20, "prompt_logprobs": 20}},
            {"request_id": "A-z.0:9_" * 16},
            {"cache_salt": "x" * 256},
            {"priority": -1_000_000},
        ):
            tokens = 2 if "stopping" not in fields else None
            answer = await server.inference.Generate(request(tokens=tokens, **fields))
            assert answer.completions[0].token_ids


async def test_a_missing_prompt_is_told() -> None:
    async with serving() as server:
        assert "prompt" in await refusal(server, inference_pb2.GenerateRequest())


async def test_all_broken_rules_are_told_at_once() -> None:
    async with serving() as server:
        named = await refusal(
            server,
            request(
                text="",
                request_id="?",
                sampling={"temperature": float("nan"), "top_p": 2.0},
                stopping={"stop_strings": [""]},
                response={"logprobs": 1000},
            ),
        )
        wanted = {"request_id", "sampling.temperature", "sampling.top_p", "stopping.stop_strings[0]", "response.logprobs"}
        assert set(named) == wanted | {"prompt.text"}


async def test_an_over_long_prompt_is_told_its_length_and_the_limit() -> None:
    async with serving() as server:
        named = await refusal(server, request((5,) * 300))
        assert "300" in named["prompt.token_ids"]
        assert "256" in named["prompt.token_ids"]


async def test_a_message_over_grpcs_limit_is_resource_exhausted() -> None:
    async with serving(rpc={"max_message_bytes": 4096}) as server:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.inference.Generate(request(text="x" * 5000))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def with_raw(message: inference_pb2.GenerateRequest, number: int, payload: bytes) -> bytes:
    """The message with one more length-delimited field, as bytes that the library would refuse to write."""
    return message.SerializeToString() + bytes([number << 3 | 2, len(payload)]) + payload


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (with_raw(inference_pb2.GenerateRequest(), 3, b"ab\xff\xfe"), "text"),
        (with_raw(request(), 2, b"\xc3"), "model"),
        (with_raw(request(), 8, b"\x1a\x02\xc3\x28"), "stopping.stop_strings[0]"),
        (with_raw(inference_pb2.GenerateRequest(), 5, b"\x0a\x05\x12\x03a\xe2\x28"), "chat.messages[0].content"),
        (b"\xff\xff\xff\xff", "request"),
    ],
)
async def test_bytes_that_are_no_request_are_told_by_field(data: bytes, field: str) -> None:
    async with serving() as server:
        call = server.channel.unary_unary(
            "/serve.v1.Inference/Generate", request_serializer=bytes, response_deserializer=lambda answer: answer
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(data)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert set(violations(caught.value)) == {field}
        assert server.count("Generate", "INVALID_ARGUMENT") == 1


@pytest.mark.parametrize(("field", "value"), [("temperature", 1e-5), ("temperature", 100.0), ("repetition_penalty", 0.01)])
def test_a_bound_itself_is_allowed_though_the_wire_rounds_it(field: str, value: float) -> None:
    checks = Checks()
    held = getattr(inference_pb2.Sampling(**{field: value}), field)
    assert checks.within(f"sampling.{field}", held, min(value, 1.0), 100.0)
