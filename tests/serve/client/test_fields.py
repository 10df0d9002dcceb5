"""Whatever the protocol has, the client has: nothing that a server takes or tells is out of its reach."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
from google.protobuf.message import Message

from serve.client import (
    AsyncClient,
    Client,
    Delta,
    Finish,
    Load,
    MadeBy,
    Model,
    Options,
    PromptInfo,
    RequestLimits,
    Score,
    Timings,
    TokenLogprob,
    Usage,
    results,
)
from serve.v1 import admin_pb2, inference_pb2, models_pb2, types_pb2


@pytest.mark.parametrize(
    ("result", "message", "elsewhere"),
    [
        (Delta, inference_pb2.Delta, set()),
        (Finish, inference_pb2.Finish, {"stop_string", "stop_id"}),  # matched_stop
        (Load, admin_pb2.GetLoadResponse, set()),
        (MadeBy, inference_pb2.MadeBy, set()),
        (Model, models_pb2.Model, set()),
        (PromptInfo, inference_pb2.PromptInfo, set()),
        (RequestLimits, models_pb2.RequestLimits, set()),
        (Score, inference_pb2.ScoreResult, set()),
        (Timings, types_pb2.Timings, set()),
        (TokenLogprob, types_pb2.TokenLogprob, set()),
        (Usage, types_pb2.Usage, set()),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_the_server_tells_the_client_hands_on(result: type, message: type[Message], elsewhere: set[str]) -> None:
    names = {field.name for field in dataclasses.fields(result)}
    assert {field.name for field in message.DESCRIPTOR.fields} - elsewhere - names == set()


def test_what_a_request_can_say_the_client_can() -> None:
    request = inference_pb2.GenerateRequest.DESCRIPTOR
    sections = [request, *(request.fields_by_name[name].message_type for name in ("sampling", "stopping", "response"))]
    sayable = {field.name for section in sections for field in section.fields}
    prompts = {field.name for field in request.oneofs_by_name["prompt"].fields}
    assert sayable - prompts - {"sampling", "stopping", "response"} | {"text", "token_ids", "add_generation_prompt"} == set(
        Options.__annotations__
    )
    score = inference_pb2.ScoreRequest.DESCRIPTOR.fields
    for client in (Client, AsyncClient):
        assert {field.name for field in score} <= inspect.signature(client.score).parameters.keys()


def test_which_weights_made_a_sequence_is_handed_on() -> None:
    made_by = [inference_pb2.MadeBy(first_token=0), inference_pb2.MadeBy(first_token=7, checkpoint_step=400)]
    event = results.event(inference_pb2.GenerateEvent(finish=inference_pb2.Finish(checkpoint_step=400, made_by=made_by)))
    assert isinstance(event, Finish)
    assert (event.checkpoint_step, event.made_by) == (400, (MadeBy(0, None), MadeBy(7, 400)))
