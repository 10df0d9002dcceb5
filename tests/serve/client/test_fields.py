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
    ScoreItem,
    Timings,
    TokenLogprob,
    Usage,
    results,
)
from serve.client.request import generate_message
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


def ask(client: Client, method: str, *arguments: object, **options: object) -> object:
    return getattr(client, method)(*arguments, **options)


@pytest.mark.parametrize(
    ("call", "options", "rule"),
    [
        (("generate", "x"), {"max_tokens": 3}, "there is no option 'max_tokens'; the nearest is 'max_new_tokens'"),
        (("generate", "x"), {"stop_strings": "END"}, "stopping.stop_strings is 'END'; it must be a sequence of str"),
        (("generate", "x"), {"stop_ids": b"7"}, "stopping.stop_ids is b'7'; it must be a sequence of int"),
        (("generate", "x"), {"stop_ids": {7: 1}}, "stopping.stop_ids is {7: 1}; it must be a sequence of int"),
        (("generate", "x"), {"stop_ids": 7}, "stopping.stop_ids is 7; it must be a sequence of int"),
        (("generate", "x"), {"logit_bias": [1]}, r"sampling.logit_bias is \[1\]; it must be a mapping of int to float"),
        (("generate", "x"), {"logit_bias": {"a": 1}}, "sampling.logit_bias is {'a': 1}; it must be a mapping of int to float"),
        (("generate", "x"), {"temperature": "hot"}, "sampling.temperature is 'hot'; it must be of type float"),
        (("generate", "x"), {"top_k": 1.5}, "sampling.top_k is 1.5; it must be of type int"),
        (("generate", "x"), {"echo": "yes"}, "response.echo is 'yes'; it must be of type bool"),
        (("generate", b"hello"), {}, "a prompt is a text, a sequence of token ids"),
        (("generate", [{"role": "user"}]), {}, r"messages\[0\] is {'role': 'user'}; it must be {'role': …, 'content': …}"),
        (("render_chat", "hi"), {}, r"messages\[0\] is 'h'; it must be"),
        (("batch", "hello"), {}, "requests is one of them; give a list"),
        (("score", "hello"), {}, "items is one text; give a list of them"),
        (("score", [[5, 6]]), {}, r"items\[0\] is \[5, 6\]; it must be a str or a ScoreItem"),
        (("score", [ScoreItem(b"hello")]), {}, r"items\[0\].token_ids.ids is b'hello'; it must be a sequence of int"),
        (("tokenize", 5), {}, "text is 5; it must be of type str"),
        (("detokenize", "12"), {}, "token_ids is '12'; it must be a sequence of int"),
    ],
)
def test_what_is_of_another_kind_is_told_by_its_name_and_never_read_letter_by_letter(
    call: tuple[object, ...], options: dict[str, object], rule: str
) -> None:
    with Client("127.0.0.1:1", retries=0) as client, pytest.raises(TypeError, match=f"^{rule}"):
        ask(client, *call, **options)  # type: ignore[arg-type]


def test_any_iterable_of_ids_will_do() -> None:
    message = generate_message("x", {"stop_ids": {7}, "banned_ids": (token for token in (1, 2))})  # type: ignore[typeddict-item]
    assert (list(message.stopping.stop_ids), list(message.sampling.banned_ids)) == ([7], [1, 2])
