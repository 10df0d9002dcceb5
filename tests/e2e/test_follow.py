"""A server follows a run: newer weights are taken between two steps, under load, exactly."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import grpc
import pytest
from transformers import PreTrainedModel

from serve.v1 import admin_pb2, inference_pb2, models_pb2
from tests.checkpoint.readers.test_adapters import LINEAR, adapted, llama
from tests.support import reference
from tests.support.models import save_step
from tests.support.server import Server, serving, until

FAMILY = "gpt_neox"
SWAPS = int(os.environ.get("TESSERA_SWAPS", "2"))
"""Exchanges under load on two ranks; a whole trial makes 20."""
MORE_SWAPS = 30
"""How many more there may be until one meets a call."""
SPOILED = "gpt_neox.layers.1.mlp.dense_4h_to_h.weight"


def put(root: Path, step: int, work: Path, *, seed: int, nan: str = "") -> Path:
    """The small model with weights of its own as the run's checkpoint of this step; one number of tensor ``nan`` is none."""
    return save_step(root, step, FAMILY, work / f"source-{step}", seed=seed, nan=nan)


class Streams:
    """Calls that are made again and again until they are told to stop, each remembered whole."""

    def __init__(self, server: Server, count: int, tokens: int) -> None:
        self.done: list[tuple[tuple[int, ...], list[int], inference_pb2.Finish]] = []
        self.errors: list[grpc.RpcError] = []
        self._server, self._tokens = server, tokens
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=((5, 6, 7, number),)) for number in range(count)]

    def __enter__(self) -> Streams:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, prompt: tuple[int, ...]) -> None:
        request = inference_pb2.GenerateRequest()
        request.token_ids.ids.extend(prompt)
        request.stopping.max_new_tokens = self._tokens
        request.stopping.ignore_eos = True
        while not self._stop.is_set():
            ids: list[int] = []
            try:
                for event in self._server.inference.GenerateStream(request, timeout=400):
                    ids.extend(event.delta.token_ids)
                self.done.append((prompt, ids, event.finish))
            except grpc.RpcError as error:
                self.errors.append(error)
                return


def expect_exact(
    models: dict[int, PreTrainedModel], prompt: tuple[int, ...], ids: list[int], finish: inference_pb2.Finish
) -> int:
    """Each stretch of the tokens is what the weights that made it say after all before. Returns how many there are."""
    made = list(finish.made_by)
    ends = [*(part.first_token for part in made[1:]), len(ids)]
    for part, end in zip(made, ends, strict=True):
        known = [*prompt, *ids[: part.first_token]]
        part_ids = ids[part.first_token : end]
        assert part_ids == reference.chosen(models[part.checkpoint_step % 2], known, part_ids)
    return len(made)


@pytest.mark.parametrize(
    ("ranks", "num_swaps", "num_streams", "memory"),
    [
        (1, 2, 4, ()),
        pytest.param(2, SWAPS, 32, (), marks=pytest.mark.slow),
        pytest.param(2, 2, 4, ("--swap-memory-gib", "0"), marks=pytest.mark.slow),
    ],
)
def test_exchanges_under_streams_lose_no_call_and_mix_up_no_token(
    ranks: int, num_swaps: int, num_streams: int, memory: tuple[str, ...], tmp_path: Path
) -> None:
    root = tmp_path / "run"
    first = put(root, 2, tmp_path, seed=0)
    options = ("--tensor-parallel-size", str(ranks), *memory)
    with serving(root, *options) as server, Streams(server, num_streams, tokens=60) as streams:
        until(lambda: len(streams.done) or streams.errors)
        pids = server.rank_pids()
        swaps = 0
        # A quick server may take each between two calls: then there are more of them.
        while swaps < num_swaps or (not streams.errors and all(len(finish.made_by) == 1 for *_, finish in streams.done)):
            swaps += 1
            assert swaps <= num_swaps + MORE_SWAPS, "no exchange met a call"
            step = 2 + swaps
            put(root, step, tmp_path, seed=step % 2)
            before = len(streams.done)
            server.admin.Reload(admin_pb2.ReloadRequest(), timeout=600)
            assert server.health() == "SERVING"
            until(lambda before=before: len(streams.done) > before or streams.errors)  # type: ignore[misc]
        assert server.rank_pids() == pids, "the ranks are the same"
        assert server.models.GetModel(models_pb2.GetModelRequest(), timeout=400).checkpoint_step == 2 + swaps
        metrics = server.metrics()
    assert not streams.errors
    assert metrics["tessera_weight_swaps_total"] == swaps
    assert metrics["tessera_engine_restarts_total"] == 0
    assert not any("state: serving -> " in line and "draining" not in line and "stopped" not in line for line in server.log)
    models = {0: reference.load(first), 1: reference.load(root / "step-00000003")}
    # Those that met an exchange first: of the others a few will do.
    calls = sorted(streams.done, key=lambda call: -len(call[2].made_by))[: 2 * num_streams]
    assert max(expect_exact(models, *call) for call in calls) > 1


def test_a_watched_run_is_followed_and_a_bad_checkpoint_is_told_of_once(tmp_path: Path) -> None:
    root = tmp_path / "run"
    put(root, 2, tmp_path, seed=0)

    with serving(root, "--watch", "0.1") as server:

        def step() -> int:
            return server.models.GetModel(models_pb2.GetModelRequest(), timeout=400).checkpoint_step

        put(root, 3, tmp_path, seed=1)
        until(lambda: step() == 3)
        put(root, 4, tmp_path, seed=0, nan=SPOILED)
        until(lambda: server.metrics()["tessera_reloads_refused_total"] == 1)
        assert step() == 3
        put(root, 5, tmp_path, seed=1)
        until(lambda: step() == 5)
        assert server.metrics()["tessera_reloads_refused_total"] == 1
        assert server.metrics()["tessera_weight_swaps_total"] == 2
        assert sum(SPOILED in line for line in server.log) == 1, "".join(server.log)


@pytest.mark.slow
def test_the_run_of_an_adapter_is_followed_beside_its_base(tmp_path: Path) -> None:
    adapter, _ = adapted(tmp_path, llama, target_modules=LINEAR)
    run = tmp_path / "run"
    shutil.copytree(adapter, run / "checkpoint-1")
    with serving(tmp_path / "base", "--adapter", str(run), "--watch", "0.1") as server:
        # At once: a copy that had no turn for two looks would be taken for all there is.
        shutil.copytree(adapter, tmp_path / "copy").rename(run / "checkpoint-2")
        until(lambda: server.metrics()["tessera_weight_swaps_total"] == 1)
        assert server.metrics()["tessera_reloads_refused_total"] == 0
