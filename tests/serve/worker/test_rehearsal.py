"""What is found out about a checkpoint while the ranks of the one before still serve: damage, and weights that are NaN."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint import CheckpointError, CheckpointWriter, open_checkpoint
from serve.config import ModelConfig, ServerConfig
from serve.errors import ConfigError
from serve.worker import finite, rehearsal
from serve.worker.finite import check_weights
from serve.worker.loader import rehearse
from serve.worker.rank_process import ForkStarter
from tests.support.models import save
from tests.support.server import until

CPU = torch.device("cpu")
SPOILED = "gpt_neox.layers.1.mlp.dense_4h_to_h.weight"


def options(folder: Path, dtype: str = "float32", verify: str = "auto") -> ServerConfig:
    return ServerConfig(model=ModelConfig(path=str(folder), dtype=dtype, device="cpu", verify=verify))


def change(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Put tensors into the folder's one weights file, in place."""
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_were_overwritten_in_place_are_named_by_the_rehearsal(tmp_path: Path, value: float) -> None:
    folder = save("gpt_neox", tmp_path, with_tokenizer=False)
    rehearse(options(folder), CPU)
    weight = load_file(folder / "model.safetensors")[SPOILED]
    weight[-1, -1] = value
    change(folder, {SPOILED: weight})
    with pytest.raises(ConfigError, match=rf"model\.safetensors: tensor '{SPOILED}' holds numbers that are NaN or infinite"):
        rehearse(options(folder), CPU)


def written(root: Path, nan: str = "") -> Path:
    """A small model as a run's checkpoint of several shards; the tensor ``nan`` is of no numbers."""
    source = save("gpt_neox", root / "source", with_tokenizer=False)
    with (
        open_checkpoint(source) as checkpoint,
        CheckpointWriter(root, step=1, config=checkpoint.config, max_shard_bytes=200_000) as writer,
    ):
        for name in checkpoint.tensors:
            tensor = checkpoint.read(name)
            writer.add(name, tensor.fill_(math.nan) if name == nan else tensor)
    return root / "step-00000001"


@pytest.mark.parametrize("verify", ["auto", "structure", "sha256"])
def test_a_checkpoint_whose_hashes_hold_may_still_hold_nan(tmp_path: Path, verify: str) -> None:
    folder = written(tmp_path, nan=SPOILED)
    with pytest.raises(ConfigError, match=rf"model-0000\d-of-0000\d\.safetensors: tensor '{SPOILED}'"):
        rehearse(options(folder, verify=verify), CPU)


def test_every_byte_that_a_manifest_proves_is_read(tmp_path: Path) -> None:
    folder = written(tmp_path)
    rehearse(options(folder), CPU)
    shard = sorted(folder.glob("*.safetensors"))[0]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(ConfigError, match=rf"{shard.name}: its sha256 is"):
        rehearse(options(folder), CPU)
    rehearse(options(folder, verify="structure"), CPU)


def test_what_the_model_does_not_take_may_be_infinite_in_the_type_it_is_served_in(tmp_path: Path) -> None:
    folder = save("gpt_neox", tmp_path, with_tokenizer=False)
    mask = "gpt_neox.layers.0.attention.masked_bias"
    change(folder, {mask: torch.tensor(-1e9)})
    rehearse(options(folder), CPU)
    with open_checkpoint(folder) as checkpoint:
        with pytest.raises(CheckpointError, match="masked_bias"):
            check_weights(checkpoint, [mask], torch.float16)
        check_weights(checkpoint, [name for name in checkpoint.tensors if name != mask], torch.float16)


def test_a_number_is_judged_in_the_type_it_is_served_in(tmp_path: Path) -> None:
    folder = save("gpt_neox", tmp_path, with_tokenizer=False)
    weight = load_file(folder / "model.safetensors")[SPOILED]
    weight[0, 0] = 1e6
    change(folder, {SPOILED: weight})
    with open_checkpoint(folder) as checkpoint:
        check_weights(checkpoint, [SPOILED], torch.float32)
        with pytest.raises(CheckpointError, match=f"{SPOILED}.*in float16"):
            check_weights(checkpoint, [SPOILED], torch.float16)


def test_every_element_is_read_once_whatever_the_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save("gpt_neox", tmp_path, with_tokenizer=False)
    monkeypatch.setattr(finite, "_PIECE_BYTES", 1000)
    with open_checkpoint(folder) as checkpoint:
        check_weights(checkpoint, checkpoint.tensors, torch.float32)
        assert checkpoint.bytes_read == sum(math.prod(i.shape) * i.dtype.itemsize for i in checkpoint.tensors.values())


async def test_a_rehearsal_is_forked_where_ranks_are_and_ends_when_it_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save("gpt_neox", tmp_path, with_tokenizer=False)
    with contextlib.closing(ForkStarter(1, "cpu", stall_seconds=60.0)) as starter:
        monkeypatch.setattr(rehearsal, "module_command", None)  # no program is started
        await rehearsal.rehearse(options(folder), starter)
        change(folder, {SPOILED: torch.full_like(load_file(folder / "model.safetensors")[SPOILED], math.nan)})
        with pytest.raises(ConfigError, match=SPOILED):
            await rehearsal.rehearse(options(folder), starter)

        assert starter._server is not None
        os.kill(starter._server.pid, signal.SIGSTOP)
        given_up = asyncio.create_task(rehearsal.rehearse(options(folder), starter))
        await asyncio.to_thread(until, starter._server._lock.locked)
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        assert starter._server is None, "an answer may still come from it"
