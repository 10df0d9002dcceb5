"""A line for every call, in a file that may be rotated, and no word of what was said in any log."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import logging
import os
import re
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest

from serve.config import RpcConfig
from serve.errors import ConfigError
from serve.rpc.audit import Audit, note
from serve.rpc.identity import CALLER, Caller
from serve.rpc.tokens import Limits
from serve.v1 import admin_pb2, inference_pb2
from tests.serve.rpc.running import request
from tests.serve.rpc.test_tokens import bearer, code_of, guarded, make

PLANTED = "the-king-of-france-is-bald"


class Call:
    def peer(self) -> str:
        return "ipv4:127.0.0.1:9"


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


async def test_every_call_has_a_line_with_its_tenant_and_what_it_used(tmp_path: Path) -> None:
    file, log = tmp_path / "tokens.json", tmp_path / "audit.log"
    token = make(file, "team")
    async with guarded(file, audit_log=str(log)) as running:
        await running.inference.Generate(request(tokens=4, request_id="mine"), **bearer(token))
        stream = running.inference.GenerateStream(request(ids=(5, 6), tokens=3), **bearer(token))
        assert await code_of(stream) is grpc.StatusCode.OK

        async def two() -> Any:
            yield request(tokens=2, request_id="first")
            yield request(tokens=3)

        assert await code_of(running.inference.GenerateBatch(two(), **bearer(token))) is grpc.StatusCode.OK
        scored = inference_pb2.ScoreRequest(request_id="score", items=[{"token_ids": {"ids": (5, 6, 7)}}] * 2)
        await running.inference.Score(scored, **bearer(token))
        refused = running.inference.Generate(request(text=PLANTED), **bearer("nobody's"))
        assert await code_of(refused) is grpc.StatusCode.UNAUTHENTICATED
        wrong = running.inference.Generate(request(tokens=4, sampling={"top_p": 7.0}), **bearer(token))
        assert await code_of(wrong) is grpc.StatusCode.INVALID_ARGUMENT
        running.ranks.last_step = running.ranks.num_steps + 1
        left = running.inference.Generate(request(tokens=9, request_id="left"), **bearer(token))
        await running.until_held()
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        await running.until(lambda: running.count("Generate", "CANCELLED") == 1)
        running.ranks.last_step = None
    written = lines(log)
    assert log.stat().st_mode & 0o777 == 0o600
    told = [
        (line["method"].rpartition("/")[2], line["tenant"], line["code"], line["requests"], line["prompt_tokens"])
        for line in written
    ]
    assert told == [
        ("Generate", "team", "OK", 1, 3),
        ("GenerateStream", "team", "OK", 1, 2),
        ("GenerateBatch", "team", "OK", 2, 6),
        ("Score", "team", "OK", 1, 6),
        ("Generate", "", "UNAUTHENTICATED", 0, 0),
        ("Generate", "team", "INVALID_ARGUMENT", 0, 0),
        ("Generate", "team", "CANCELLED", 1, 3),
    ]
    assert [line["generated_tokens"] for line in written[:4]] == [4, 3, 5, 0]
    assert [written[place]["request_id"] for place in (0, 2, 3, 6)] == ["mine", "first", "score", "left"]
    for line in written:
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])
        assert re.fullmatch(r"ipv[46]:.*:\d+", line["peer"])
        assert 0 <= line["seconds"] < 600
    known = [(line["queue_seconds"] is not None, line["first_token_seconds"] is not None) for line in written]
    assert known[:6] == [(True, True)] * 3 + [(True, False)] + [(False, False)] * 2
    for line in written[:2]:
        assert 0 <= line["queue_seconds"] <= line["first_token_seconds"] <= line["seconds"]


def test_durations_are_of_the_request_that_waited_longest_and_of_the_first_token_of_all(tmp_path: Path) -> None:
    file, now = tmp_path / "audit.log", [5.0]
    audit = Audit(file=str(file), clock=lambda: now[0])
    entry = audit.entry("a/Batch", Call())
    for now[0], queue_seconds in ((5.5, 0.25), (6.0, 0.875), (6.5, 0.125)):
        note(queue_seconds=queue_seconds)
        note(generated_tokens=1)
    now[0] = 9.0
    entry.ended("OK")
    audit.close()
    (line,) = lines(file)
    assert (line["seconds"], line["queue_seconds"], line["first_token_seconds"]) == (4.0, 0.875, 0.5)


async def test_whoever_has_steps_recorded_is_in_the_book(tmp_path: Path) -> None:
    file, log = tmp_path / "tokens.json", tmp_path / "audit.log"
    operator, writer = make(file, "operator", "admin"), make(file, "writer", "generate")
    async with guarded(file, audit_log=str(log)) as running:
        assert await code_of(running.admin.Profile(admin_pb2.ProfileRequest(), **bearer(operator))) is grpc.StatusCode.OK
        denied = running.admin.Profile(admin_pb2.ProfileRequest(), **bearer(writer))
        assert await code_of(denied) is grpc.StatusCode.PERMISSION_DENIED
    told = [(line["method"], line["tenant"], line["code"]) for line in lines(log)]
    assert told == [("serve.v1.Admin/Profile", "operator", "OK"), ("serve.v1.Admin/Profile", "", "PERMISSION_DENIED")]


async def test_no_log_has_a_word_of_prompts_answers_or_tokens(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, log = tmp_path / "tokens.json", tmp_path / "audit.log"
    token = make(file, "team")
    caplog.set_level(logging.DEBUG)
    async with guarded(file, audit_log=str(log), access_log_sample=1.0) as running:
        answer = await running.inference.Generate(request(text=PLANTED, tokens=8), **bearer(token))
        for fields in ({"chat": {"messages": [{"role": PLANTED, "content": PLANTED}]}}, {"text": PLANTED * 900}):
            await code_of(running.inference.Generate(request(**fields), **bearer(token)))
        await code_of(running.inference.Generate(request(text=PLANTED), **bearer(token[:-1])))
    said = log.read_text() + caplog.text
    assert said.count("/Generate") == 8, "each call is in both"
    generated = answer.completions[0].text
    assert len(generated) >= 3
    for secret in (PLANTED, token, token[:-1], generated):
        assert secret not in said
        assert json.dumps(secret)[1:-1] not in said


def test_lines_go_to_the_file_of_that_name_wherever_the_one_before_went(tmp_path: Path) -> None:
    file = tmp_path / "audit.log"
    audit = Audit(file=str(file), clock=lambda: 7.0, now=lambda: 0.0)
    audit.entry("a/B", Call()).ended("OK")
    audit.close()
    audit = Audit(file=str(file), clock=lambda: 7.0, now=lambda: 0.0)
    audit.entry("a/B", Call()).ended("OK")
    audit.flush()
    file.rename(tmp_path / "audit.log.1")
    audit.entry("a/C", Call()).ended("INTERNAL")
    audit.close()
    assert [line["method"] for line in lines(tmp_path / "audit.log.1")] == ["a/B", "a/B"]
    assert [(line["method"], line["code"], line["time"]) for line in lines(file)] == [
        ("a/C", "INTERNAL", "1970-01-01T00:00:00.000Z")
    ]


def test_text_keeps_the_words_of_clients_on_their_line(tmp_path: Path) -> None:
    file, seconds = tmp_path / "audit.log", [1.0]
    audit = Audit(file=str(file), as_text=True, clock=lambda: seconds[0], now=lambda: 0.0)
    held = CALLER.set(Caller("team", frozenset(), Limits()))
    try:
        entry = audit.entry("serve.v1.Inference/Generate", Call())
        seconds[0] = 1.125
        note('x"\ncode="OK', requests=1, prompt_tokens=2, generated_tokens=3)
        seconds[0] = 1.25
        entry.ended("CANCELLED")
    finally:
        CALLER.reset(held)
    audit.close()
    assert file.read_text() == (
        'time=1970-01-01T00:00:00.000Z tenant="team" peer="ipv4:127.0.0.1:9" method="serve.v1.Inference/Generate" '
        'code="CANCELLED" seconds=0.25 queue_seconds= first_token_seconds=0.125 '
        'request_id="x\\"\\ncode=\\"OK" requests=1 prompt_tokens=2 generated_tokens=3\n'
    )


def test_the_access_log_has_the_share_of_calls_that_was_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    draws = iter((0.1, 0.9, 0.24, 0.25))
    audit = Audit(sample=0.25, chance=lambda: next(draws))
    with caplog.at_level(logging.INFO, "serve.access"):
        for number in range(4):
            audit.entry(f"call-{number}", Call()).ended("OK")
    assert [re.findall(r"call-\d", record.getMessage()) for record in caplog.records] == [["call-0"], ["call-2"]]


def test_a_file_that_cannot_be_written_is_told_at_the_start_and_once_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match=r"rpc\.audit_log is '.*nowhere.*'; it cannot be written: No such file"):
        Audit(file=str(tmp_path / "nowhere" / "audit.log"))
    folder = tmp_path / "folder"
    folder.mkdir()
    file = folder / "audit.log"
    lost: list[None] = []
    audit = Audit(file=str(file), lost=lambda: lost.append(None))
    file.unlink()
    folder.rename(tmp_path / "away")
    for _ in range(3):
        audit.entry("a/B", Call()).ended("OK")
    audit.flush()
    (tmp_path / "away").rename(folder)
    audit.entry("a/C", Call()).ended("OK")
    audit.close()
    assert [line["method"] for line in lines(file)] == ["a/C"]
    assert len(lost) == 3
    assert [record.message.partition(";")[0] for record in caplog.records] == [
        "the audit log cannot be written", "the audit log is written again",
    ]  # fmt: skip


def test_lines_that_a_slow_disk_does_not_take_have_an_end_and_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve.rpc.audit.LINES_WAITING", 10)
    disk = tmp_path / "audit.log"
    os.mkfifo(disk)  # which takes nothing more until somebody reads
    reader, writer = os.open(disk, os.O_RDONLY | os.O_NONBLOCK), os.open(disk, os.O_WRONLY | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while os.write(writer, b"\n"):
            pass
    os.close(writer)
    lost: list[None] = []
    audit = Audit(file=str(disk), lost=lambda: lost.append(None))
    written = 100
    for _ in range(written):
        audit.entry("a/B", Call()).ended("OK")
    assert len(lost) in (written - 10, written - 11), "the thread that writes may have one in hand"
    os.set_blocking(reader, True)
    with concurrent.futures.ThreadPoolExecutor(1) as thread, open(reader, encoding="utf-8") as file:
        told = thread.submit(file.read)
        audit.flush()
        audit.entry("a/C", Call()).ended("OK")
        audit.close()
        methods = [json.loads(line)["method"] for line in told.result().splitlines() if line]
    assert methods == ["a/B"] * (written - len(lost)) + ["a/C"]
    assert [record.message for record in caplog.records] == [
        "the audit log's disk is too slow: 10 lines wait for it, and more are lost",
        f"the audit log keeps up again; lines that were lost: {len(lost)}",
    ]


def test_books_of_a_disk_that_has_no_room_for_a_line_more_are_closed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve.rpc.audit.LINES_WAITING", 1)
    audit = Audit(file=str(tmp_path / "audit.log"))
    goes_on = threading.Event()
    write = audit._listener.handlers[0].handle
    monkeypatch.setattr(audit._listener.handlers[0], "handle", lambda record: goes_on.wait() and write(record))
    for _ in range(3):
        audit.entry("a/B", Call()).ended("OK")
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        closing = thread.submit(audit.close)
        goes_on.set()
        closing.result()
    assert 1 <= len(lines(tmp_path / "audit.log")) <= 3


def test_the_share_lies_between_none_and_all() -> None:
    with pytest.raises(ConfigError, match=r"rpc\.access_log_sample is 1\.5"):
        RpcConfig(access_log_sample=1.5)
