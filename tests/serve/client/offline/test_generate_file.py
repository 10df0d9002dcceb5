"""A file of requests answered by real servers on loopback: each line once, in order, exact, whatever is killed meanwhile."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from serve.client import BadLine, FileReport, TesseraError, generate_file
from serve.client.cli import main
from serve.runtime.state import State
from tests.repo.documents import REPOSITORY
from tests.serve.fake_executor import expected_tokens
from tests.serve.rpc.message_server import message_server
from tests.serve.rpc.running import serving, state_is, tokenizer
from tests.serve.runtime.ranks import LOSING

Files = tuple[Path, Path]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def ask(files: Files, lines: Sequence[dict[str, Any]]) -> None:
    files[0].write_text("".join(json.dumps(line) + "\n" for line in lines))


def numbered(count: int, tokens: int = 6) -> list[dict[str, Any]]:
    return [
        {"id": f"q{n}", "prompt_ids": [5, 6, 7 + n], "max_new_tokens": tokens, "ignore_eos": True, "seed": n}
        for n in range(count)
    ]


def answers(files: Files) -> list[dict[str, Any]]:
    return [json.loads(line) for line in files[1].read_text().splitlines()]


def are_exact(files: Files, lines: Sequence[dict[str, Any]]) -> bool:
    """Whether each line has its own answer, once, in its place."""
    found = answers(files)
    assert [(one["line"], one["id"]) for one in found] == [(n, line["id"]) for n, line in enumerate(lines, 1)]
    for line, one in zip(lines, found, strict=True):
        expected = expected_tokens(
            line["prompt_ids"], line["max_new_tokens"], seed=line["seed"], vocab_size=tokenizer().vocab_size
        )
        assert one["answer"]["completions"][0]["token_ids"] == expected, one["line"]
    return True


async def run(files: Files, *addresses: str, **arguments: Any) -> FileReport:
    return await asyncio.to_thread(generate_file, *files, addresses=addresses, **arguments)


async def test_each_line_is_answered_in_order_and_never_more_are_in_flight_than_said(files: Files) -> None:
    lines = numbered(40)
    lines[0]["max_new_tokens"] = 60  # the others have ended long before
    ask(files, lines)
    async with serving() as server:
        most = 0

        def look(_: object) -> None:
            nonlocal most
            most = max(most, server.gateway.num_in_flight)

        server.ranks.executor.on_execute = look
        report = await run(files, server.address, in_flight=4)
        assert are_exact(files, lines)
        assert 1 < most <= 4
    assert (report.num_lines, report.num_before, report.num_written, report.num_failed) == (40, 0, 40, 0)
    assert report.num_tokens == 60 + 39 * 6


async def test_the_answer_is_what_the_command_prints_for_one_request(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    ask(files, [{"prompt": "The dog", "seed": 1}, {"chat": [{"role": "user", "content": "hi"}], "echo": True, "logprobs": 1}])
    async with serving() as server:
        words = ["--address", server.address, "--max-new-tokens", "3", "--ignore-eos"]
        out = ["--batch", str(files[0]), "--out", str(files[1])]
        assert await asyncio.to_thread(main, [*words, *out]) == 0
        assert "2 of 2 lines (100%)" in capsys.readouterr().err
        assert await asyncio.to_thread(main, ["The dog", *words, "--seed", "1", "--json", "--no-stream"]) == 0
        single = json.loads(capsys.readouterr().out)
    plain, chat = (one["answer"] for one in answers(files))
    assert plain["completions"][0]["text"] == single["completions"][0]["text"]
    assert plain.keys() == single.keys()
    assert chat["prompt"]["text"].startswith("user: hi")
    assert len(chat["completions"][0]["logprobs"]) == 3


async def test_a_line_that_is_refused_has_its_error_in_its_place_and_the_exit_code_says_so(
    files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = numbered(3)
    lines[1]["temperature"] = -1.0
    ask(files, lines)
    async with serving() as server:
        words = ["--address", server.address, "--batch", str(files[0]), "--out", str(files[1])]
        for _ in range(2):  # nothing is left for the second run, which says the same
            assert await asyncio.to_thread(main, words) == 1
            assert f'1 of 3 lines have an "error" in {files[1]} instead of an answer' in capsys.readouterr().err
        assert server.count("Generate", "OK") == 2
    first, second, third = answers(files)
    assert "answer" in first
    assert "answer" in third
    assert second["error"]["code"] == "INVALID_ARGUMENT"
    assert second["error"]["violations"][0]["field"] == "sampling.temperature"


@pytest.mark.parametrize("cut", [1, 30, 200])
async def test_half_a_line_at_the_end_is_written_anew_and_what_is_there_is_not_computed_again(files: Files, cut: int) -> None:
    lines = numbered(6)
    ask(files, lines)
    async with serving() as server:
        await run(files, server.address)
        whole = files[1].read_bytes().splitlines(keepends=True)
        files[1].write_bytes(b"".join(whole[:3]) + whole[3][:cut])
        report = await run(files, server.address)
        assert (report.num_before, report.num_written) == (3, 6)
        assert server.count("Generate", "OK") == 9
    assert are_exact(files, lines)
    assert files[1].read_bytes().splitlines(keepends=True)[:3] == whole[:3]


async def test_answers_to_other_requests_are_left_as_they_are_and_nothing_is_sent(files: Files) -> None:
    lines = numbered(4)
    ask(files, lines)
    async with serving() as server:
        await run(files, server.address)
        before = files[1].read_bytes()
        for changed in (lines[:2], [*lines[:2], {**lines[2], "seed": 99}, lines[3]]):
            ask(files, changed)
            with pytest.raises(BadLine, match=r"out\.jsonl:3: "):
                await run(files, server.address)
        ask(files, lines)
        with pytest.raises(BadLine, match=r"out\.jsonl:1: not an answer to this line"):
            await run(files, server.address, defaults={"temperature": 0.5})
        for foreign in (b"a letter to somebody", b'{"line": 1}\n', b"\x00\x01\n"):
            files[1].write_bytes(foreign)
            with pytest.raises(BadLine, match=r"out\.jsonl:1: "):
                await run(files, server.address)
            assert files[1].read_bytes() == foreign
        files[1].write_bytes(before)
        with pytest.raises(ValueError, match="the same file"):
            await run((files[0], files[0]), server.address)
        assert server.count("Generate", "OK") == 4


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([{"prompt": "x"}, {"prompt": "x", "top_q": 1}], ":2: there is no field 'top_q'"),
        ([{"prompt": "x", "id": 1}, {"prompt": "y"}, {"prompt": "z", "id": 1}], ":3: line 1 has the id 1 too"),
    ],
)
def test_a_bad_line_is_told_before_anything_is_sent(
    files: Files, lines: list[dict[str, Any]], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ask(files, lines)
    assert main(["--batch", str(files[0]), "--out", str(files[1]), "--address", "127.0.0.1:1"]) == 2
    assert str(files[0]) + words in capsys.readouterr().err
    assert not files[1].exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--batch", "in"], "--batch and --out must be given together"),
        (["--out", "out"], "--batch and --out must be given together"),
        (["a prompt", "--batch", "in", "--out", "out"], "--batch and a prompt exclude"),
        (["--batch", "in", "--out", "out", "--chat"], "--batch and --chat exclude"),
        (["--batch", "in", "--out", "out", "--in-flight", "0"], "in_flight is 0"),
        (["--batch", "in", "--out", "out", "--progress", "0"], "--progress"),
    ],
)
def test_options_that_make_no_sense_are_usage_errors(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert told in capsys.readouterr().err


def test_a_file_that_is_not_there_is_exit_code_1(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--batch", str(files[0]), "--out", str(files[1])]) == 1
    assert f"No such file or directory: '{files[0]}'" in capsys.readouterr().err


async def test_a_run_that_is_killed_goes_on_where_it_was(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    lines = numbered(60, tokens=20)
    ask(files, lines)
    async with serving() as server:
        server.ranks.last_step = 100  # of about 300
        words = ["--batch", str(files[0]), "--out", str(files[1]), "--address", server.address, "--in-flight", "4"]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "serve.client", *words, cwd=REPOSITORY, stderr=asyncio.subprocess.PIPE
        )
        await server.until(lambda: server.ranks.num_steps >= 100)
        await server.until(lambda: files[1].read_bytes().count(b"\n") >= 4)
        with pytest.raises(ValueError, match="is being written by another run"):
            await run(files, server.address)
        process.send_signal(signal.SIGKILL)
        await process.communicate()
        server.ranks.last_step = None
        await server.until(lambda: server.gateway.num_in_flight == 0)
        before, done = files[1].read_bytes(), server.count("Generate", "OK")
        assert 4 <= before.count(b"\n") < 60
        assert await asyncio.to_thread(main, words) == 0
        assert f"{before.count(bytes([10]))} of them from before" in capsys.readouterr().err
        assert server.count("Generate", "OK") == done + 60 - before.count(b"\n")
    assert are_exact(files, lines)
    assert files[1].read_bytes().startswith(before)


async def test_a_server_that_is_killed_has_its_requests_answered_by_the_others(files: Files) -> None:
    lines = numbered(200, tokens=40)
    ask(files, lines)
    changes: list[tuple[str, bool]] = []
    async with serving() as server:
        with message_server() as other:
            work = asyncio.create_task(
                run(files, server.address, other.address, in_flight=8, on_change=lambda *change: changes.append(change))
            )
            await server.until(lambda: files[1].exists() and files[1].read_bytes().count(b"\n") >= 10)
            await asyncio.to_thread(other.kill)
            report = await work
            assert server.count("Generate", "OK") < 200
    assert are_exact(files, lines)
    assert changes == [(other.address, False)]
    assert (report.num_failed, report.down) == (0, (other.address,))


async def test_a_server_whose_ranks_die_is_used_again_when_it_serves(files: Files) -> None:
    lines = numbered(12, tokens=30)
    ask(files, lines)
    changes: list[bool] = []
    async with serving(supervisor=LOSING) as server:
        server.ranks.last_step = 20
        first = server.ranks
        work = asyncio.create_task(run(files, server.address, on_change=lambda _, is_up: changes.append(is_up)))
        await server.until(lambda: first.num_steps == 20)
        first.kill()
        await server.until(lambda: len(server.lives) == 2)
        assert (await work).num_failed == 0
        await server.until(state_is(server, State.SERVING))
        assert server.count("Generate", "UNAVAILABLE") >= 1
    assert changes == [False, True]
    assert are_exact(files, lines)


async def test_a_queue_that_is_full_is_waited_for(files: Files) -> None:
    lines = numbered(12)
    ask(files, lines)
    async with serving(scheduler={"max_num_seqs": 1}, admission={"max_queued_requests": 1}) as server:
        server.ranks.go.clear()  # one begins, one waits: there is room for no other until they go on
        work = asyncio.create_task(run(files, server.address))
        await server.until(lambda: server.count("Generate", "RESOURCE_EXHAUSTED") >= 1)
        server.ranks.go.set()
        assert (await work).num_failed == 0
    assert are_exact(files, lines)


async def test_a_request_that_breaks_inside_one_server_is_tried_at_another(files: Files) -> None:
    lines = numbered(8)
    ask(files, lines)
    async with serving(fault_token=10) as broken, serving() as sound:
        assert (await run(files, broken.address, sound.address)).num_failed == 0
    assert are_exact(files, lines)
    files[1].unlink()
    async with serving(fault_token=10) as one, serving(fault_token=10) as other:
        assert (await run(files, one.address, other.address)).num_failed == 1
    assert [("error" in one, one["id"]) for one in answers(files)][3] == (True, "q3")


async def test_a_run_without_a_server_ends_and_leaves_what_it_has(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    lines = numbered(3)
    ask(files, lines)
    words = ["--batch", str(files[0]), "--out", str(files[1]), "--address", "127.0.0.1:1, 127.0.0.1:2", "--patience", "0.3"]
    assert await asyncio.to_thread(main, words) == 1
    told = capsys.readouterr().err
    assert "127.0.0.1:1 does not serve; its requests go elsewhere or wait" in told
    assert "no server is left: none has served for 0.3 seconds" in told
    assert files[1].read_bytes() == b""
    async with serving() as server:
        await run(files, server.address)
    assert are_exact(files, lines)


async def test_what_every_line_would_be_told_ends_the_run(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: Any, **__: Any) -> Any:
        raise TesseraError("UNAUTHENTICATED", "no token")

    monkeypatch.setattr("serve.client.pool.AsyncPool.generate", refuse)
    ask(files, numbered(3))
    with pytest.raises(TesseraError, match="no token"):
        await run(files, "127.0.0.1:1")
    assert files[1].read_bytes() == b""


async def test_the_last_report_tells_the_whole_run_and_the_first_comes_before_it(files: Files) -> None:
    ask(files, numbered(5))
    reports: list[FileReport] = []
    async with serving() as server:
        last = await run(files, server.address, on_progress=reports.append)
    assert [report.num_written for report in (reports[0], reports[-1])] == [0, 5]
    assert reports[-1].num_tokens == last.num_tokens == 30
