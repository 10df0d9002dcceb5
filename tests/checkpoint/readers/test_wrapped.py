"""Models that something wraps: its names go, and an adapter in a save is joined, whoever wrote the files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from checkpoint import CheckpointError, Given, open_checkpoint
from tests.checkpoint.folders import plain_folder, some_tensors, write_config
from tests.checkpoint.readers.deepspeed_folders import zero3_of

WANT = {"transformer.wte.weight": torch.randn(11, 6), "transformer.h.0.ln_1.weight": torch.randn(6)}
ADAPTER = {"peft_type": "LORA", "r": 2, "lora_alpha": 6}


def wrapped(prefix: str, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    return {prefix + name: tensor for name, tensor in WANT.items()} | more


def holds(path: Path, **given: Any) -> bool:
    with open_checkpoint(path, given=Given(**given)) as checkpoint:
        found = {name: checkpoint.read(name) for name in checkpoint.tensors}
    return found.keys() == WANT.keys() and all(torch.equal(found[name], tensor) for name, tensor in WANT.items())


@pytest.mark.parametrize("prefix", ["model.", "_forward_module.model.", "module.", ""])
def test_what_stands_before_all_names_of_a_save_of_zero_goes(tmp_path: Path, prefix: str) -> None:
    zero3_of(tmp_path, wrapped(prefix), 2)
    assert holds(tmp_path)
    if prefix:
        assert holds(tmp_path, prefix=prefix)


def test_of_names_that_differ_the_users_prefix_says_which_are_the_models(tmp_path: Path) -> None:
    zero3_of(tmp_path, wrapped("student.", other=torch.ones(2)), 2)
    with open_checkpoint(tmp_path) as checkpoint:
        assert "student.transformer.wte.weight" in checkpoint.tensors, "nothing is guessed"
    assert holds(tmp_path, prefix="student.")
    with pytest.raises(CheckpointError, match=r"holds no tensor whose name begins with 'teacher\.'"):
        open_checkpoint(tmp_path, given=Given(prefix="teacher."))


def test_the_prefix_counts_in_folders_of_hugging_face_too(tmp_path: Path) -> None:
    plain_folder(tmp_path, wrapped("student.", other=torch.ones(2)))
    assert holds(tmp_path, prefix="student.")


@pytest.mark.parametrize("beside", [False, True])
def test_what_accelerate_gathers_of_fsdp_is_opened_where_nothing_else_is_there(tmp_path: Path, beside: bool) -> None:
    folder = write_config(tmp_path / "run" / "checkpoint-3")
    torch.save(WANT, folder / "pytorch_model_fsdp.bin")
    if beside:
        plain_folder(folder)
    for path in (folder, folder.parent):
        with open_checkpoint(path) as checkpoint:
            assert checkpoint.tensors.keys() == (some_tensors() if beside else WANT).keys()


def with_factors(name: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A layer below peft's names beside the embedding, and what they are joined to."""
    base, down, up = torch.randn(5, 7), torch.randn(2, 7), torch.randn(5, 2)
    layer = f"{name}transformer.h.0.mlp.up"
    parts = {"base_layer": base, "lora_A.default": down, "lora_B.default": up}
    stored = {f"{layer}.{kind}.weight": tensor for kind, tensor in parts.items()}
    return stored | {f"{name}transformer.wte.weight": WANT["transformer.wte.weight"]}, base + 3 * up @ down


@pytest.mark.parametrize("written", ["safetensors", "distcp"])
@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_an_adapter_in_any_save_is_joined_by_its_description(tmp_path: Path, written: str) -> None:
    stored, want = with_factors("base_model.model." if written == "safetensors" else "model.base_model.model.")
    folder = write_config(tmp_path / "save")
    if written == "safetensors":
        save_file(stored, folder / "model.safetensors")
    else:
        dcp.save(stored, checkpoint_id=folder, no_dist=True)
    with pytest.raises(CheckpointError, match=r"holds an adapter, and nothing in it says how .*--adapter-config"):
        open_checkpoint(folder)
    (tmp_path / "adapter_config.json").write_text(json.dumps(ADAPTER))
    with open_checkpoint(folder, given=Given(adapter_config=str(tmp_path / "adapter_config.json"))) as checkpoint:
        assert torch.allclose(checkpoint.read("transformer.h.0.mlp.up.weight"), want, rtol=0, atol=1e-6)
        assert torch.equal(checkpoint.read("transformer.wte.weight"), WANT["transformer.wte.weight"])


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_factors_without_their_base_are_told_for_what_they_are(tmp_path: Path) -> None:
    stored = {name: tensor for name, tensor in with_factors("model.base_model.model.")[0].items() if "lora_" in name}
    dcp.save(stored, checkpoint_id=write_config(tmp_path), no_dist=True)
    with pytest.raises(CheckpointError, match="holds an adapter and not its base model"):
        open_checkpoint(tmp_path)


def test_a_file_of_lightning_is_told_for_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").write_bytes(b"")
    with pytest.raises(CheckpointError, match="is a file of PyTorch Lightning's, which is not read"):
        open_checkpoint(tmp_path / "last.ckpt")
