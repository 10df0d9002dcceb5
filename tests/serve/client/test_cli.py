"""The ``tessera-generate`` command: its words, its exit codes, its manners."""

from __future__ import annotations

import asyncio
import io
import json
import shlex
import signal
import sys
from pathlib import Path

import pytest

from serve.client.cli import main
from tests.serve.fake_executor import expected_tokens
from tests.serve.rpc.running import RunningServer, serving, tokenizer

REPOSITORY = Path(__file__).resolve().parents[3]


async def run(server: RunningServer, *arguments: str) -> int:
    return await asyncio.to_thread(main, ["--address", server.address, *arguments])


def expected_text(server: RunningServer, prompt: str, count: int, seed: int) -> str:
    return tokenizer().decode(expected_tokens(tokenizer().encode(prompt), count, seed=seed, vocab_size=server.vocab_size))


async def test_text_is_streamed_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving() as server:
        assert await run(server, "The quick", "--max-new-tokens", "8", "--seed", "4", "--ignore-eos", "--stats") == 0
        out, err = capsys.readouterr()
        assert out == expected_text(server, "The quick", 8, 4) + "\n"
        assert "8 generated, ended by length" in err


async def test_the_prompt_is_read_from_standard_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving() as server:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("größe\nzwei\n".encode())))
        assert await run(server, "--max-new-tokens", "3", "--seed", "1", "--ignore-eos", "--echo") == 0
        assert capsys.readouterr().out == "größe\nzwei" + expected_text(server, "größe\nzwei", 3, 1) + "\n"


async def test_standard_input_that_is_not_utf8_is_a_usage_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff")))
    assert main([]) == 2
    assert "byte 2" in capsys.readouterr().err


async def test_json_is_one_object_per_event(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving() as server:
        arguments = ["The dog", "--json", "--max-new-tokens", "5", "--seed", "2", "--ignore-eos", "--logprobs", "1"]
        assert await run(server, *arguments, "--request-id", "mine") == 0
        events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [events[0]["event"], events[-1]["event"]] == ["prompt", "finish"]
        assert {event["request_id"] for event in events} == {"mine"}
        deltas = [event for event in events if event["event"] == "delta"]
        assert "".join(delta["text"] for delta in deltas) == expected_text(server, "The dog", 5, 2)
        assert all(len(delta["logprobs"]) == len(delta["token_ids"]) for delta in deltas)
        assert events[-1]["usage"]["completion_tokens"] == 5


async def test_json_without_streaming_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving() as server:
        arguments = ["The dog", "--json", "--no-stream", "--max-new-tokens", "5", "--num-sequences", "2", "--ignore-eos"]
        assert await run(server, *arguments) == 0
        answer = json.loads(capsys.readouterr().out)
        assert [completion["index"] for completion in answer["completions"]] == [0, 1]
        assert all(len(completion["token_ids"]) == 5 for completion in answer["completions"])


async def test_several_sequences_are_shown_one_after_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving() as server:
        assert await run(server, "The", "--max-new-tokens", "3", "--num-sequences", "2", "--ignore-eos", "--seed", "1") == 0
        out = capsys.readouterr().out
        assert "── 1 of 2 ──" in out
        assert "── 2 of 2 ──" in out


async def test_all_the_flags_arrive(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving() as server:
        seen: list[object] = []
        server.ranks.executor.on_execute = lambda plan: seen.extend(plan.starts)
        flags = (
            "--temperature 0.5 --top-k 7 --top-p 0.25 --min-p 0.125 --typical-p 0.75 --seed 11 --repetition-penalty 1.5 "
            "--presence-penalty 0.5 --frequency-penalty -0.5 --allow-id 9 --allow-id 10 --ban-id 11 --logit-bias 9=-2.5 "
            "--max-new-tokens 6 --min-new-tokens 2 --stop-id 12 --stop xyz --include-stop --priority 3 --cache-salt s "
            "--pin-weights --model fake --no-special-tokens --prompt-logprobs 1 --logprobs 2 --prompt-ids 5,6"
        )
        assert await run(server, *flags.split()) == 0
        start = seen[0]
        sampling = start.sampling  # type: ignore[attr-defined]
        assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 7, 0.25, 0.125)
        assert (sampling.typical_p, sampling.seed, sampling.repetition_penalty) == (0.75, 11, 1.5)
        assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.logit_bias) == (0.5, -0.5, ((9, -2.5),))
        assert (sampling.allowed_ids, sampling.banned_ids) == ((9, 10), (11,))
        assert (start.token_ids, start.min_new_tokens, set(start.end_ids)) == ((5, 6), 2, {0, 12})  # type: ignore[attr-defined]
        assert (start.logprobs, start.prompt_logprobs) == (2, 1)  # type: ignore[attr-defined]


async def test_a_chat_is_sent_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving() as server:
        assert await run(server, "hi", "--system", "Be brief.", "--max-new-tokens", "1", "--echo", "--ignore-eos") == 0
        assert capsys.readouterr().out.startswith("system: Be brief.\nuser: hi\nassistant:")


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (["x", "--temperature", "nan"], 2, "sampling.temperature"),
        (["x", "--temperature", "warm"], 2, "--temperature"),
        (["x", "--model", "other"], 2, "not served"),
        (["x", "--top-k", "-1"], 2, "top_k"),
        (["x", "--prompt-ids", "1,2"], 2, "not both"),
        (["--prompt-ids", "1,b"], 2, "list of token ids"),
        (["x", "--logit-bias", "7"], 2, "ID=VALUE"),
        (["x", "--timeout", "-1"], 2, "--timeout"),
        (["x", "--timeout", "0.0001"], 1, "DEADLINE_EXCEEDED"),
    ],
)
async def test_exit_codes_and_one_readable_line(
    arguments: list[str], code: int, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving() as server:
        assert await run(server, *arguments) == code
        err = capsys.readouterr().err
        assert word in err
        assert "Traceback" not in err


def test_a_server_that_is_not_there_is_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["x", "--address", "127.0.0.1:1", "--retries", "0"]) == 1
    assert "no server answers at 127.0.0.1:1" in capsys.readouterr().err


def test_help_names_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "Exit codes" in capsys.readouterr().out


async def test_ctrl_c_cancels_the_request_and_ends_the_command() -> None:
    async with serving() as server:
        server.ranks.last_step = 3
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "serve.client", "The dog", "--address", server.address, "--ignore-eos", "--echo",
            cwd=REPOSITORY, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None
        assert await process.stdout.read(1)  # it is in the middle of its stream
        process.send_signal(signal.SIGINT)
        _, err = await asyncio.wait_for(process.communicate(), 120)
        assert process.returncode == 1
        assert b"interrupted" in err
        assert b"Traceback" not in err
        await server.until(lambda: server.gateway.num_in_flight == 0)
        server.ranks.last_step = None
        await server.until_stats(lambda stats: stats.kv_blocks_used == 0)


async def test_a_reader_that_leaves_is_no_traceback() -> None:
    async with serving() as server:
        process = await asyncio.create_subprocess_shell(
            f"{shlex.quote(sys.executable)} -m serve.client 'The dog' --address {server.address} --ignore-eos --echo"
            " | head -c 1",
            cwd=REPOSITORY, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, err = await asyncio.wait_for(process.communicate(), 120)
        assert out == b"T"
        assert err == b""
