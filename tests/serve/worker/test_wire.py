"""Plans, results and records survive the trip between server and ranks."""

from __future__ import annotations

import dataclasses
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.config import CacheConfig, ModelConfig, ServerConfig
from serve.engine.executor import ModelFacts
from serve.engine.plan import PromptLogprobs, Sampled, SequenceFault, Span, Start, StepPlan, StepResult
from serve.types import SamplingParams, TokenLogprob
from serve.worker import wire

ids = st.integers(0, 2**31 - 1)
tuples_of_ids = st.lists(ids, max_size=5).map(tuple)
floats = st.floats(allow_nan=False, width=64)
sampling = st.builds(
    SamplingParams,
    temperature=floats,
    top_k=ids,
    top_p=floats,
    min_p=floats,
    typical_p=floats,
    seed=st.integers(0, 2**64 - 1),
    repetition_penalty=floats,
    presence_penalty=floats,
    frequency_penalty=floats,
    logit_bias=st.lists(st.tuples(ids, floats), max_size=3).map(tuple),
    allowed_ids=tuples_of_ids,
    banned_ids=tuples_of_ids,
)
optional_count = st.none() | st.integers(0, 20)
starts = st.builds(
    Start,
    sequence=ids,
    index=ids,
    token_ids=tuples_of_ids,
    num_prompt_tokens=ids,
    sampling=sampling,
    min_new_tokens=ids,
    end_ids=tuples_of_ids,
    logprobs=optional_count,
    prompt_logprobs=optional_count,
)
spans = st.builds(
    Span,
    sequence=ids,
    start=ids,
    count=ids,
    continues=st.booleans(),
    new_tokens=tuples_of_ids,
    new_blocks=tuples_of_ids,
    sample=st.booleans(),
)
plans = st.builds(
    StepPlan,
    step=ids,
    starts=st.lists(starts, max_size=3).map(tuple),
    spans=st.lists(spans, max_size=3).map(tuple),
    dropped=tuples_of_ids,
)
logprobs = st.builds(TokenLogprob, ids, floats, ids, st.lists(st.tuples(ids, floats), max_size=3).map(tuple))
results = st.builds(
    StepResult,
    step=ids,
    sampled=st.lists(st.builds(Sampled, sequence=ids, token_id=ids, logprob=st.none() | logprobs), max_size=3).map(tuple),
    prompt_logprobs=st.lists(
        st.builds(PromptLogprobs, sequence=ids, first=ids, logprobs=st.lists(logprobs, max_size=3).map(tuple)), max_size=2
    ).map(tuple),
    faults=st.lists(st.builds(SequenceFault, sequence=ids, message=st.text(), not_finite=st.booleans()), max_size=2).map(tuple),
)


@given(plans)
def test_a_plan_comes_out_as_it_went_in(plan: StepPlan) -> None:
    assert wire.decode_plan(wire.encode(plan)) == plan


@given(results)
def test_a_result_comes_out_as_it_went_in(result: StepResult) -> None:
    assert wire.decode_result(wire.encode(result)) == result


def test_the_configuration_comes_out_as_it_went_in() -> None:
    config = ServerConfig(model=ModelConfig(path="/m", max_model_len=77), cache=CacheConfig(kv_cache_gib=0.25))
    assert wire.decode_config(wire.encode_config(config)) == config


def test_a_configuration_from_a_release_with_other_messages_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = wire.form()
    older = dataclasses.make_dataclass("StepPlan", [("step", int)], frozen=True)
    monkeypatch.setattr(wire, "StepPlan", older)
    wire.form.cache_clear()
    message = wire.encode_config(ServerConfig(model=ModelConfig(path="/m")))
    assert wire.form() != ours
    monkeypatch.undo()
    wire.form.cache_clear()
    with pytest.raises(wire.Malformed, match="a first message of another release: Tessera was changed while the server ran"):
        wire.decode_config(message)


def test_the_form_of_the_messages_is_the_same_in_every_process() -> None:
    command = [sys.executable, "-c", "from serve.worker import wire; print(wire.form())"]
    for seed in ("1", "2"):
        other = subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True)
        assert other.stdout.strip() == wire.form(), other.stderr


def test_what_a_rank_reports_comes_out_as_it_went_in() -> None:
    for report in (wire.Failed("no such file", configured=True), wire.Fine()):
        assert wire.decode_report(wire.encode(report)) == report
    facts = ModelFacts(
        family="opt",
        vocab_size=9,
        max_model_len=8,
        eos_ids=(1, 2),
        dtype="float32",
        device="cpu",
        num_blocks=3,
        block_tokens=16,
        num_parameters=1,
        checkpoint_step=None,
        load_seconds=(("build", 0.5), ("weights", 1.5)),
    )
    assert wire.decode_report(wire.encode(wire.Ready(facts))) == wire.Ready(facts)


DECODERS: tuple[Callable[[bytes], object], ...] = (
    wire.decode_plan, wire.decode_result, wire.decode_config, wire.decode_report,
)  # fmt: skip


@given(st.binary(max_size=60) | st.just(b"\x91" * 5000), st.sampled_from(DECODERS))
def test_bytes_that_are_no_message_are_refused(payload: bytes, decode: Callable[[bytes], object]) -> None:
    with pytest.raises(wire.Malformed, match=f"a message of {len(payload)} bytes"):
        decode(payload)


@given(plans, st.data())
def test_a_message_of_the_wrong_kind_length_or_type_is_refused(plan: StepPlan, data: st.DataObject) -> None:
    whole = wire.encode(plan)
    cut = data.draw(st.integers(0, len(whole) - 1))
    tree = msgspec.msgpack.decode(whole)
    wrong = msgspec.msgpack.encode({**tree, "spans": [{"sequence": "one", "start": 0, "count": 1}]})
    for payload, says in ((whole[:cut], "message"), (whole + b"\x00", "message"), (wrong, r"\$.spans\[0\].sequence")):
        with pytest.raises(wire.Malformed, match=says):
            wire.decode_plan(payload)
    for decode in (wire.decode_config, wire.decode_report):
        with pytest.raises(wire.Malformed):
            decode(whole)


def test_a_closed_connection_and_an_absurd_length_are_told_apart_from_messages() -> None:
    here, there = socket.socketpair()
    with here, there:
        wire.send(here, b"abc")
        assert wire.receive(there) == b"abc"
        here.sendall(struct.pack("!I", wire.MAX_MESSAGE_BYTES + 1))
        with pytest.raises(wire.ConnectionLost, match="at most"):
            wire.receive(there)
        here.sendall(struct.pack("!I", 10) + b"half")
        here.close()
        with pytest.raises(wire.ConnectionLost, match="closed"):
            wire.receive(there)


def test_who_waits_for_a_message_wakes_when_it_comes_and_when_one_side_is_gone() -> None:
    ours, theirs = socket.socketpair()

    def wakes(waker: Callable[[], object]) -> bool:
        waiting = threading.Thread(target=wire.await_message, args=(ours, 400.0), daemon=True)
        waiting.start()
        waker()
        waiting.join(200.0)
        return not waiting.is_alive()

    wire.await_message(ours, 0.0)  # nothing comes, and no longer is waited
    assert wakes(lambda: wire.send(theirs, b"result"))
    assert wire.receive(ours) == b"result"
    assert wakes(lambda: ours.shutdown(socket.SHUT_RDWR))
    theirs.close()
    ours.close()
    assert wakes(lambda: None)


def test_a_message_that_overtakes_is_seen_before_it_is_received() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert not wire.is_overtaken(ours)
        wire.send(theirs, b"in its turn")
        assert not wire.is_overtaken(ours)
        wire.send(theirs, b"", overtakes=True)
        assert not wire.is_overtaken(ours), "the one before it is received first"
        assert wire.receive(ours) == b"in its turn"
        assert wire.is_overtaken(ours)
        assert wire.is_overtaken(ours), "to look takes nothing away"
        assert wire.receive(ours) == b""
        theirs.close()
        assert not wire.is_overtaken(ours), "who is gone overtakes nothing"


def test_who_waits_for_a_message_hears_the_bell_and_tells_it_from_a_message() -> None:
    ours, theirs = socket.socketpair()
    bell = os.eventfd(0)
    with ours, theirs:
        try:
            os.eventfd_write(bell, 1)
            assert not wire.await_message(ours, 400.0, bell)
            wire.send(theirs, b"result")
            assert wire.await_message(ours, 400.0, bell)
            assert os.eventfd_read(bell) == 1, "it is left to ring"
            assert wire.await_message(ours, 400.0, bell)
        finally:
            os.close(bell)
