"""A run writes its next checkpoint; the server is told to serve it, and goes on."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest

from checkpoint import claimed
from serve.v1 import admin_pb2, inference_pb2, models_pb2, tokenizer_pb2
from tests.support import leases, reference
from tests.support.models import save_step
from tests.support.server import Server, serving, until

PROMPT = (5, 6, 7, 8)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    save_step(tmp_path / "run", 1, "gpt_neox", tmp_path / "first")
    return tmp_path / "run"


@pytest.fixture
def server(root: Path) -> Iterator[Server]:
    with serving(root, "--tensor-parallel-size", "2", "--drain-seconds", "120") as running:
        yield running


def may_go(folder: Path) -> bool:
    """Whether a training run would remove this save."""
    with claimed(folder) as free:
        return free


def has_mapped(pid: int, folder: Path) -> bool:
    """Whether a process has mapped a file below a folder."""
    return str(folder.resolve()) in Path(f"/proc/{pid}/maps").read_text()


def ask(tokens: int) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest()
    request.token_ids.ids.extend(PROMPT)
    request.stopping.max_new_tokens = tokens
    request.stopping.ignore_eos = True
    return request


def test_the_next_checkpoint_is_served_by_the_same_server(server: Server, root: Path, tmp_path: Path) -> None:
    old = reference.greedy(reference.load(root / "step-00000001"), PROMPT, 400)
    calls: list[list[int]] = []
    began = threading.Event()

    def stream() -> None:
        ids: list[int] = []
        for event in server.inference.GenerateStream(ask(400), timeout=400):
            ids.extend(event.delta.token_ids)
            began.set()
        calls.append(ids)

    under_way = threading.Thread(target=stream)
    new = save_step(root, 2, "gpt2", tmp_path / "second")
    under_way.start()
    assert began.wait(120)
    ranks = server.rank_pids()
    server.admin.Reload(admin_pb2.ReloadRequest(), timeout=600)
    under_way.join()
    assert calls == [old], "a call in flight ends as it began"

    model = server.models.GetModel(models_pb2.GetModelRequest(), timeout=400)
    assert (model.family, model.checkpoint_step, model.name) == ("gpt2", 2, "run")
    answer = server.inference.Generate(ask(64), timeout=400).completions[0]
    assert list(answer.token_ids) == reference.greedy(reference.load(new), PROMPT, 64)
    assert server.tokenizer.Tokenize(tokenizer_pb2.TokenizeRequest(text="def"), timeout=400).token_ids
    assert not any(psutil.pid_exists(pid) for pid in ranks)
    assert len(server.rank_pids()) == 2
    assert not may_go(new)
    until(lambda: may_go(root / "step-00000001"))
    metrics = server.metrics()
    assert metrics["tessera_engine_up"] == 1
    assert metrics["tessera_engine_restarts_total"] == 0


def test_a_checkpoint_that_cannot_be_served_leaves_the_ranks_of_the_one_before(
    server: Server, root: Path, tmp_path: Path
) -> None:
    expected = reference.greedy(reference.load(root / "step-00000001"), PROMPT, 32)
    ranks = server.rank_pids()

    def refusal() -> str:
        with pytest.raises(grpc.RpcError) as caught:
            server.admin.Reload(admin_pb2.ReloadRequest(), timeout=600)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "what was served before goes on" in caught.value.details()
        assert server.health() == "SERVING"
        assert server.rank_pids() == ranks, "the ranks that serve are not given up for what cannot be loaded"
        answer = server.inference.Generate(ask(32), timeout=400).completions[0]
        assert list(answer.token_ids) == expected
        return caught.value.details()

    # Of another shape than config.json says, which takes the built model to see.
    second = save_step(root, 2, "gpt_neox", tmp_path / "second", intermediate_size=170)
    assert "dense_h_to_4h" in refusal()
    # Whole, and of numbers that are none: its ranks would only know when the others had ended.
    spoiled = "gpt_neox.layers.1.mlp.dense_4h_to_h.weight"
    second = save_step(root, 2, "gpt_neox", tmp_path / "third", nan=spoiled)
    assert f"model.safetensors: tensor '{spoiled}' holds numbers that are NaN or infinite in float32" in refusal()
    until(lambda: may_go(second))
    assert not may_go(root / "step-00000001")
    # Cut short in place: the one that is being served, and there is no other.
    shutil.rmtree(second)
    (root / "latest").write_text("step-00000001")
    shard = root / "step-00000001" / "model.safetensors"
    if leases.WHY_NOT:  # who cuts it does not wait until ranks need it no more, as they do for some seconds after a start
        until(lambda: not any(has_mapped(pid, root) for pid in ranks))
    os.truncate(shard, shard.stat().st_size // 2)
    assert "model.safetensors" in refusal()
    assert server.models.GetModel(models_pb2.GetModelRequest(), timeout=400).checkpoint_step == 1
