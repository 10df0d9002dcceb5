"""Servers with a fault in them: what is looked at must find each, and nothing in one that has none."""

from __future__ import annotations

import datetime
import threading

import grpc

from serve.rpc.tokens import add_token
from serve.v1 import inference_pb2
from tests.chaos.case import ENDED, RANKS, Case, Field, Report, goes_on, is_leaking, under_load
from tests.chaos.history import CALL_SECONDS, script
from tests.chaos.mutant import MUTANTS
from tests.support.server import Server, serving, until

_CANCELLED = 16
_FOUND = {
    "leaked-block": "KV blocks leaked",
    "dropped-event": "wrong answers",
    "doubled-event": "wrong answers",
    "answer-after-cancel": "cancelled requests went on to their end",
    "expired-token": "a token that has expired was accepted",
}
"""What is said of each of ``MUTANTS``."""


def _cancel_some(server: Server, report: Report) -> None:
    """Calls that are cancelled when they begin: their requests must not go on."""
    before = server.metrics()[ENDED]

    def call(number: int) -> None:
        stream = server.inference.GenerateStream(script(number), timeout=CALL_SECONDS)
        next(stream)
        stream.cancel()

    threads = [threading.Thread(target=call, args=(number,)) for number in range(_CANCELLED)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    until(lambda: (now := server.metrics())["tessera_num_requests_running"] + now["tessera_num_requests_waiting"] == 0)
    # One that ended before its cancel came did nothing wrong; more than a few never do.
    went_on = server.metrics()[ENDED] - before
    report.expect(went_on <= _CANCELLED / 2, _FOUND["answer-after-cancel"])
    report.expect(not is_leaking(server), _FOUND["leaked-block"])


def _code(server: Server, token: str) -> str:
    """How a small request ends with a token."""
    request = inference_pb2.GenerateRequest()
    request.token_ids.ids.append(5)
    request.stopping.max_new_tokens = 1
    try:
        server.inference.Generate(request, timeout=CALL_SECONDS, metadata=(("authorization", f"Bearer {token}"),))
    except grpc.RpcError as error:
        return error.code().name
    return "OK"


def _try_tokens(field: Field, report: Report) -> None:
    """One that counts opens a server, one that has expired does not."""
    file = field.folder("tokens") / "tokens.json"
    now = datetime.datetime.now(datetime.UTC)
    tokens = [
        add_token(file, name, scopes=("generate",), expires=now + datetime.timedelta(days=days), given={})
        for name, days in (("current", 1), ("former", -1))
    ]
    with serving(field.model, *RANKS, "--tokens", str(file), program=field.program) as server:
        current, former = (_code(server, token) for token in tokens)
    report.expect(current == "OK", "a token that counts was refused")
    report.expect(former != "OK", _FOUND["expired-token"])
    report.expect(former in ("OK", "UNAUTHENTICATED"), f"a token that has expired ended a call with {former}")


def _look(field: Field, report: Report) -> None:
    """Load without a fault, calls that are cancelled, and tokens."""
    assert field.expected
    with serving(field.model, *RANKS, program=field.program) as server:
        with under_load(field, report, server) as (load, _):
            goes_on(load)
        _cancel_some(server, report)
    _try_tokens(field, report)


def _sound(field: Field, report: Report, rounds: int) -> None:
    for _ in range(rounds):
        _look(field, report)


def _planted(field: Field, report: Report, rounds: int) -> None:
    assert field.expected
    field.close()
    for name in list(MUTANTS) * rounds:
        found = Report(name)
        _look(field.of(("tests.chaos.mutant", name)), found)
        report.figures[name] = found.found
        report.expect(_FOUND[name] in found.found, f"{name} was not found")


CASES: dict[str, Case] = {
    "sound": Case("none: load, calls that are cancelled, tokens that expired", _sound, 1),
    "planted": Case("faults in the server itself, each of which must be found", _planted, 1),
}
