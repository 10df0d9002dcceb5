"""What a rank or a rehearsal sends that is no message of theirs ends it with a reason."""

from __future__ import annotations

import sys

import pytest

from serve.config import ModelConfig, ServerConfig
from serve.engine.executor import ExecutorDied, ModelFacts
from serve.engine.plan import StepPlan
from serve.errors import RankStartError
from serve.worker import rank_process, rehearsal, wire
from serve.worker.executor import RankExecutor

CONFIG = ServerConfig(model=ModelConfig(path="/m", device="cpu"))
FACTS = ModelFacts(
    family="opt", vocab_size=9, max_model_len=8, eos_ids=(1,), dtype="float32", device="cpu", num_blocks=3, block_tokens=16,
    num_parameters=1, checkpoint_step=None,
)  # fmt: skip


def rank_that_answers(*answers: bytes) -> list[str]:
    """The command of a rank without a model: one answer to each message."""
    program = f"""
import socket, sys
from serve.worker import wire
end = socket.socket(fileno=int(sys.argv[2]))
for answer in {answers!r}:
    wire.receive(end)
    wire.send(end, answer)
"""
    return [sys.executable, "-c", program]


def test_a_rank_that_starts_with_something_else_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_process, "module_command", lambda _: rank_that_answers(b"hello"))
    with pytest.raises(RankStartError, match=r"^rank 0 started with a message of 5 bytes that is not the expected one: "):
        RankExecutor(CONFIG).start()


def test_a_rank_that_answers_a_step_with_something_else_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = (wire.encode(wire.Ready(FACTS)), b"\x81\xa4step\xa1x")
    monkeypatch.setattr(rank_process, "module_command", lambda _: rank_that_answers(*answers))
    executor = RankExecutor(CONFIG)
    try:
        assert executor.start() == FACTS
        with pytest.raises(ExecutorDied, match=r"^rank 0 answered step 7 with .*Expected `int`, got `str` - at `\$\.step`$"):
            executor.execute(StepPlan(step=7))
    finally:
        executor.close()


async def test_a_rehearsal_that_answers_something_else_is_a_failed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "module_command", lambda _: [sys.executable, "-c", "print('all is well')"])
    with pytest.raises(RankStartError, match="the process that tried the checkpoint answered with a message of 12 bytes"):
        await rehearsal.rehearse(CONFIG)


async def test_ranks_and_rehearsals_of_another_release_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The installation was upgraded below a running server, which then starts processes of the new one."""
    monkeypatch.setattr(wire, "form", lambda: "older")
    says = "was told a first message of another release: Tessera was changed while the server ran; start the server again"
    with pytest.raises(RankStartError, match=f"^rank 0 {says}$"):
        RankExecutor(CONFIG).start()
    with pytest.raises(RankStartError, match=f"^it {says}$"):
        await rehearsal.rehearse(CONFIG)
