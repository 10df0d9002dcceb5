"""Generation over a real connection: what is asked for comes back, and nothing else."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from serve.v1 import inference_pb2, types_pb2
from tests.serve.fake_executor import expected_tokens
from tests.serve.rpc.running import EOS, RunningServer, request, serving, tokenizer


def expected(server: RunningServer, ids: tuple[int, ...], count: int, **options: Any) -> list[int]:
    return expected_tokens(ids, count, vocab_size=server.vocab_size, **options)


async def test_generate_answers_once_with_everything() -> None:
    async with serving() as server:
        answer = await server.inference.Generate(
            request((5, 6, 7), 20, request_id="mine", sampling={"seed": 9, "temperature": 0})
        )
        ids = expected(server, (5, 6, 7), 20, seed=9)
        completion = answer.completions[0]
        assert answer.request_id == "mine"
        assert answer.prompt.prompt_tokens == 3
        assert list(completion.token_ids) == ids
        assert completion.text == tokenizer().decode(ids)
        assert completion.finish.reason == types_pb2.FINISH_REASON_LENGTH
        assert completion.finish.WhichOneof("matched_stop") is None
        assert completion.finish.usage.completion_tokens == 20
        assert completion.finish.seed == 9
        assert 0 <= completion.finish.timings.first_token_seconds <= completion.finish.timings.total_seconds
        assert not completion.logprobs
        assert not answer.prompt.token_ids


async def test_a_stream_is_prompt_info_then_deltas_then_finish() -> None:
    async with serving() as server:
        events = [event async for event in server.inference.GenerateStream(request((5, 6), 30, sampling={"seed": 1}))]
        kinds = [event.WhichOneof("event") for event in events]
        assert kinds[0] == "prompt"
        assert kinds[-1] == "finish"
        assert set(kinds[1:-1]) == {"delta"}
        ids = expected(server, (5, 6), 30, seed=1)
        assert [token_id for event in events for token_id in event.delta.token_ids] == ids
        assert "".join(event.delta.text for event in events) == tokenizer().decode(ids)
        assert len({event.request_id for event in events}) == 1


async def test_streamed_text_never_splits_a_character() -> None:
    async with serving() as server:
        for seed in range(20):
            stream = server.inference.GenerateStream(request((5,), 60, sampling={"seed": seed}))
            texts = [event.delta.text async for event in stream if event.WhichOneof("event") == "delta"]
            # Random tokens of a byte-level vocabulary are full of broken characters: each U+FFFD must be one that decoding
            # all ids at once shows too.
            assert "".join(texts) == tokenizer().decode(expected(server, (5,), 60, seed=seed))


async def test_text_is_tokenised_as_the_tokenizer_does() -> None:
    async with serving() as server:
        answer = await server.inference.Generate(request(text="The quick", response={"echo": True}))
        assert list(answer.prompt.token_ids) == list(tokenizer().encode("The quick"))
        assert answer.prompt.text == "The quick"


async def test_a_chat_becomes_the_templates_prompt() -> None:
    async with serving() as server:
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        answer = await server.inference.Generate(request(chat=chat, response={"echo": True}))
        assert answer.prompt.text == "user: hi\nassistant:"
        chat["add_generation_prompt"] = False  # type: ignore[assignment]
        answer = await server.inference.Generate(request(chat=chat, response={"echo": True}))
        assert answer.prompt.text == "user: hi\n"


async def test_response_options_say_what_comes_back() -> None:
    async with serving() as server:
        asked = {"text": False, "token_ids": False, "logprobs": 2, "prompt_logprobs": 1}
        answer = await server.inference.Generate(request((5, 6, 7), 3, response=asked))
        completion = answer.completions[0]
        assert completion.text == ""
        assert not completion.token_ids
        assert [len(entry.top) for entry in completion.logprobs] == [2, 2, 2]
        assert [entry.token_id for entry in answer.prompt.logprobs] == [5, 6, 7]
        assert [entry.HasField("logprob") for entry in answer.prompt.logprobs] == [False, True, True]
        assert [len(entry.top) for entry in answer.prompt.logprobs] == [0, 1, 1]


async def test_each_sequence_has_deltas_and_a_finish_of_its_own() -> None:
    async with serving() as server:
        stream = server.inference.GenerateStream(request((5, 6), 8, sampling={"num_sequences": 3, "seed": 4}))
        ids: dict[int, list[int]] = {0: [], 1: [], 2: []}
        finished = []
        async for event in stream:
            ids[event.delta.index].extend(event.delta.token_ids)
            if event.WhichOneof("event") == "finish":
                finished.append(event.finish.index)
        assert sorted(finished) == [0, 1, 2]
        assert ids == {index: expected(server, (5, 6), 8, seed=4, index=index) for index in range(3)}
        answer = await server.inference.Generate(request((5, 6), 8, sampling={"num_sequences": 3, "seed": 4}))
        assert [list(completion.token_ids) for completion in answer.completions] == list(ids.values())


@pytest.mark.parametrize("include", [False, True])
async def test_a_stop_string_ends_the_text(include: bool) -> None:
    async with serving() as server:
        ids = expected(server, (5,), 40, seed=2)
        text = tokenizer().decode(ids)
        stop = text[20:23]
        stopping = {"stop_strings": [stop], "include_stop": include}
        answer = await server.inference.Generate(request((5,), 40, sampling={"seed": 2}, stopping=stopping))
        completion = answer.completions[0]
        assert completion.finish.reason == types_pb2.FINISH_REASON_STOP_STRING
        assert completion.finish.stop_string == stop
        assert completion.text == text[: text.index(stop) + (len(stop) if include else 0)]


async def test_eos_and_stop_ids_end_the_sequence_and_are_told_apart() -> None:
    async with serving() as server:
        ids = expected(server, (5,), 50, seed=3)
        stopping = {"stop_ids": [ids[4]]}
        answer = await server.inference.Generate(request((5,), 50, sampling={"seed": 3}, stopping=stopping))
        finish = answer.completions[0].finish
        assert finish.reason == types_pb2.FINISH_REASON_STOP_ID
        assert finish.stop_id == ids[4]
        # Only EOS may be sampled: the sequence ends with its first token.
        asked = request((5,), 50, sampling={"seed": 3})
        asked.stopping.ignore_eos = False
        for seed in range(2000):
            if expected(server, (5,), 1, seed=seed)[0] == EOS:
                asked.sampling.seed = seed
                break
        answer = await server.inference.Generate(asked)
        assert answer.completions[0].finish.reason == types_pb2.FINISH_REASON_EOS
        assert answer.completions[0].finish.stop_id == EOS


async def test_unset_max_new_tokens_is_all_the_room_there_is() -> None:
    async with serving() as server:
        answer = await server.inference.Generate(request((5, 6, 7), None))
        assert answer.completions[0].finish.usage.completion_tokens == 256 - 3


async def test_an_unset_seed_is_drawn_and_told_and_gives_the_same_again() -> None:
    async with serving() as server:
        first = await server.inference.Generate(request((5,), 12))
        second = await server.inference.Generate(request((5,), 12))
        seed = first.completions[0].finish.seed
        assert seed != second.completions[0].finish.seed
        again = await server.inference.Generate(request((5,), 12, sampling={"seed": seed}))
        assert again.completions[0].token_ids == first.completions[0].token_ids


async def test_max_new_tokens_zero_gives_the_prompt_alone() -> None:
    async with serving() as server:
        answer = await server.inference.Generate(request((5, 6), 0, response={"echo": True, "prompt_logprobs": 0}))
        assert list(answer.prompt.token_ids) == [5, 6]
        assert len(answer.prompt.logprobs) == 2
        assert answer.completions[0].finish.usage.completion_tokens == 0


async def test_a_model_without_tokenizer_takes_and_gives_ids() -> None:
    async with serving(text=None) as server:
        answer = await server.inference.Generate(request((5, 6), 4))
        assert list(answer.completions[0].token_ids)
        assert answer.completions[0].text == ""
        for field in (
            {"text": "x"},
            {"chat": {"messages": [{"role": "user"}]}},
            {"stopping": {"stop_strings": ["x"]}},
            {"response": {"text": True}},
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await server.inference.Generate(request(**field))
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION, field


async def test_a_chat_without_a_template_is_a_failed_precondition() -> None:
    async with serving(text=tokenizer(chat=False)) as server:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.inference.Generate(request(chat={"messages": [{"role": "user", "content": "hi"}]}))
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "chat template" in caught.value.details()


async def test_another_models_name_is_not_found_and_ours_is_not_asked_for() -> None:
    async with serving() as server:
        await server.inference.Generate(request(model="fake"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.inference.Generate(request(model="gpt-9"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_live_request_id_already_exists() -> None:
    async with serving() as server:
        server.ranks.go.clear()
        first = asyncio.ensure_future(server.inference.Generate(request(request_id="x")))
        await server.until(lambda: server.gateway.num_in_flight == 1)
        second = asyncio.ensure_future(server.inference.Generate(request(request_id="x")))
        await server.until(lambda: server.gateway.num_in_flight == 2)
        server.ranks.go.set()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await second
        assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
        assert len((await first).completions[0].token_ids) == 4


async def test_a_request_that_breaks_inside_the_engine_is_alone_in_that() -> None:
    async with serving(fault_token=13) as server:
        good = asyncio.ensure_future(server.inference.Generate(request((5, 6), 30, sampling={"seed": 5})))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.inference.Generate(request((13,), 4))
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        ids = expected(server, (5, 6), 30, seed=5)
        assert list((await good).completions[0].token_ids) == ids[:30]
        assert 13 not in ids[:29]


async def test_default_temperature_is_one_where_sampling_is_asked_for_and_zero_elsewhere() -> None:
    seen: dict[int, float] = {}
    async with serving() as server:
        server.ranks.executor.on_execute = lambda plan: seen.update(
            {s.token_ids[0]: s.sampling.temperature for s in plan.starts}
        )
        cases: list[tuple[dict[str, Any], float]] = [
            ({}, 0.0),
            ({"repetition_penalty": 1.1}, 0.0),
            ({"top_k": 3}, 1.0),
            ({"top_p": 0.5}, 1.0),
            ({"min_p": 0.5}, 1.0),
            ({"typical_p": 0.5}, 1.0),
            ({"seed": 0}, 1.0),
            ({"num_sequences": 2}, 1.0),
            ({"num_sequences": 1}, 0.0),
            ({"top_k": 3, "temperature": 0.0}, 0.0),
            ({"temperature": 0.5}, 0.5),
        ]
        for first_id, (sampling, _) in enumerate(cases):
            await server.inference.Generate(request((first_id, 5), 1, sampling=sampling))
        assert seen == {first_id: temperature for first_id, (_, temperature) in enumerate(cases)}


def test_the_stub_that_is_generated_knows_all_four_methods() -> None:
    methods = {method.name for method in inference_pb2.DESCRIPTOR.services_by_name["Inference"].methods}
    assert methods == {"Generate", "GenerateStream", "GenerateBatch", "Score"}
