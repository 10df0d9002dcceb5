"""A server whose ranks are two stages of two: it says what one process says, whatever becomes of its ranks and its weights."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest
from transformers import PreTrainedModel

from serve.v1 import admin_pb2, inference_pb2, models_pb2
from tests.chaos.history import Load, judge, undisturbed
from tests.support import reference
from tests.support.models import VOCABULARY, save_step
from tests.support.server import Server, serving, until

pytestmark = pytest.mark.slow

STREAMS = 12
PROMPT = tuple(range(7, 107))
"""Several steps long where a step has 32 tokens."""


def test_stages_of_several_ranks_say_what_one_process_says_lose_no_call_and_take_newer_weights(tmp_path: Path) -> None:
    root = tmp_path / "run"
    first = reference.load(save_step(root, 1, "gpt_neox", tmp_path / "first"))
    options = ["--max-num-seqs", str(STREAMS), "--max-step-tokens", "32"]
    with serving(root, *options) as alone:
        expected = undisturbed(alone, tmp_path / "first")
    with serving(root, *options, "--tensor-parallel-size", "2", "--pipeline-parallel-size", "2") as server:
        model = server.models.GetModel(models_pb2.GetModelRequest(), timeout=400)
        assert (model.tensor_parallel_size, model.pipeline_parallel_size) == (2, 2)
        assert (len(ranks(server)), server.ready["tp"], server.ready["pp"]) == (4, "2", "2")
        says_what_transformers_says(server, first)
        load = Load(server, 0, expected, streams=STREAMS)
        with load.going_on():
            for victim in (1, 2):  # a second rank, and the one that draws
                until(lambda: len(load.under_way()) == STREAMS)
                met, killed = load.under_way(), ranks(server)
                os.kill(killed[victim], signal.SIGKILL)
                until(lambda met=met: all(call.code is not None for call in met))  # type: ignore[misc]  # bound now
                assert not any(psutil.pid_exists(pid) for pid in killed)
                assert f"engine down: rank {victim} died: signal SIGKILL" in down(server)[-1]
        verdict = judge(load.calls, expected)
        assert (verdict.lost, verdict.wrong) == ({}, 0), f"of {verdict.calls} calls"
        assert len(down(server)) == 2

        serving_ranks = ranks(server)
        second = reference.load(save_step(root, 2, "gpt_neox", tmp_path / "second", seed=1))
        server.admin.Reload(admin_pb2.ReloadRequest(), timeout=400)
        says_what_transformers_says(server, second)
        assert ranks(server) == serving_ranks, "they took the weights between two steps"
        assert server.metrics()["tessera_weight_swaps_total"] == 1

        last = Load(server, 1, expected, streams=STREAMS)
        with last.going_on():
            until(lambda: len(last.under_way()) == STREAMS)
            ending = last.under_way()
            server.process.send_signal(signal.SIGTERM)
            last.stop()
        assert {call.code for call in ending} == {"OK"}, "who drains ends what was begun"


def ranks(server: Server) -> list[int]:
    """The processes of all four."""
    return until(lambda: len(pids := server.rank_pids()) == 4 and pids)


def down(server: Server) -> list[str]:
    """Lines that tell why ranks were lost."""
    return [line for line in server.log if "engine down" in line]


def says_what_transformers_says(server: Server, model: PreTrainedModel) -> None:
    """A prompt in chunks, then from the prefix cache, then scored."""
    request = inference_pb2.GenerateRequest()
    request.token_ids.ids.extend(PROMPT)
    request.stopping.max_new_tokens = 24
    request.stopping.ignore_eos = True
    expected, cached = reference.greedy(model, PROMPT, 24), []
    for _ in range(2):
        answer = server.inference.Generate(request, timeout=400)
        assert list(answer.completions[0].token_ids) == expected
        cached.append(answer.prompt.cached_tokens)
    assert cached == [0, 96]
    target = [(5 * place) % VOCABULARY for place in range(40)]
    item = inference_pb2.ScoreItem()
    item.context_ids.ids.extend(PROMPT)
    item.token_ids.ids.extend(target)
    scored = server.inference.Score(inference_pb2.ScoreRequest(items=[item]), timeout=400).results[0]
    judged = reference.logprobs(model, [*PROMPT, *target])
    assert [token.logprob for token in scored.tokens] == pytest.approx(
        [float(judged[len(PROMPT) + place - 1, token]) for place, token in enumerate(target)], abs=1e-4
    )
