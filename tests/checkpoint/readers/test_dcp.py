"""torch.distributed.checkpoint: opened as a script left it; what cannot be read is refused by file and rule."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from checkpoint import CheckpointError, Given, open_checkpoint
from checkpoint.layout import Extent, joined
from checkpoint.opening.slices import read_stored
from tests.checkpoint.folders import write_config
from tests.checkpoint.readers.trainers_dcp import titan_name

MODEL = "transformer.wte.weight"
CONFIG = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 16}


def tensors() -> dict[str, torch.Tensor]:
    make = torch.Generator().manual_seed(0)
    return {MODEL: torch.randn(11, 6, generator=make), "transformer.h.0.mlp.c_fc.weight": torch.randn(6, 8, generator=make)}


def saved(folder: Path, state: dict[str, Any]) -> Path:
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return write_config(folder)


def remade(folder: Path, change: Callable[[Any], None]) -> None:
    """Change the folder's table and write it again."""
    path = folder / ".metadata"
    table = pickle.loads(path.read_bytes())
    change(table)
    path.write_bytes(pickle.dumps(table, protocol=4))


def box(first: int, columns: int) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size([first, 0]), torch.Size([1, columns]))


def refusal(folder: Path, **given: Any) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught, open_checkpoint(folder, given=Given(**given)):
        pass
    return caught.value


def assert_opens(folder: Path, want: dict[str, torch.Tensor], **given: Any) -> None:
    with open_checkpoint(folder, given=Given(**given)) as checkpoint:
        assert set(checkpoint.tensors) == set(want)
        for name, tensor in want.items():
            assert torch.equal(checkpoint.read(name), tensor), name


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> Any:
    """Saving without ranks warns that there are none, each time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.distributed.checkpoint.state_dict_saver.warnings.warn", lambda *_, **__: None)
        yield


@pytest.mark.parametrize("prefix", ["", "model.", "app.state.model.", "model._orig_mod."])
def test_the_prefix_of_the_weights_is_found(tmp_path: Path, prefix: str) -> None:
    others = {"optim.state.transformer.wte.weight.exp_avg": torch.zeros(11, 6), "step": 4}
    folder = saved(tmp_path / "step-4", {prefix + name: tensor for name, tensor in tensors().items()} | others)
    assert_opens(folder, tensors())
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.step == 4


def test_of_several_models_the_prefix_must_be_given(tmp_path: Path) -> None:
    state = {f"teacher.{n}": t for n, t in tensors().items()} | {f"student.{n}": t + 1 for n, t in tensors().items()}
    folder = saved(tmp_path / "a", state)
    assert "'student.' or 'teacher.'" in refusal(folder).rule
    assert_opens(folder, tensors(), prefix="teacher.")
    assert "begins with 'pupil.'" in refusal(folder, prefix="pupil.").rule


def test_tensors_are_read_by_the_strides_they_were_saved_with(tmp_path: Path) -> None:
    turned = tensors()[MODEL].t().contiguous().t()
    folder = saved(tmp_path / "a", {MODEL: turned})
    with open_checkpoint(folder) as checkpoint:
        assert torch.equal(checkpoint.read(MODEL, (slice(2, 9), slice(1, 4))), turned[2:9, 1:4])


def torchtitan(heads: int, groups: int, width: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The rows of one layer's q, k and v as transformers has them, and fused as torchtitan stored them for a while."""
    make = torch.Generator().manual_seed(1)
    counts = {"q": heads, "k": groups, "v": groups}
    rows = {key: torch.randn(count * width, 6, generator=make) for key, count in counts.items()}
    native = {
        key: tensor if key == "v" else tensor.view(counts[key], 2, width // 2, 6).transpose(1, 2).reshape(tensor.shape)
        for key, tensor in rows.items()
    }
    parts = [native[key].view(groups, -1, width, 6) for key in "qkv"]
    fused = torch.cat(parts, dim=1).reshape(-1, 6).contiguous()
    others = {"tok_embeddings.weight": torch.randn(11, 6), "layers.0.feed_forward.w1.weight": torch.randn(5, 6)}
    return {f"model.layers.0.self_attn.{key}_proj.weight": tensor for key, tensor in rows.items()}, {
        "layers.0.attention.qkv_linear.wqkv.weight": fused
    } | others


def test_torchtitans_fused_rows_become_those_of_transformers(tmp_path: Path) -> None:
    want, stored = torchtitan(heads=4, groups=2, width=4)
    folder = saved(tmp_path / "a", stored)
    write_config(folder, CONFIG)
    with open_checkpoint(folder) as checkpoint:
        for name, tensor in want.items():
            assert torch.equal(checkpoint.read(name), tensor), name
            assert torch.equal(checkpoint.read(name, (slice(3, 7), slice(1, 5))), tensor[3:7, 1:5])
    write_config(folder, {"model_type": "gpt2"})
    assert "read for Llama 3 and Qwen 3" in refusal(folder).rule


@pytest.mark.parametrize("fused", [False, True])
def test_torchtitans_qwen_3_is_read_and_its_rows_are_left_in_their_order(tmp_path: Path, fused: bool) -> None:
    import transformers

    sizes = {"vocab_size": 11, "hidden_size": 12, "intermediate_size": 10, "num_hidden_layers": 2, "head_dim": 6}
    config = transformers.Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2)
    want = transformers.Qwen3ForCausalLM(config).state_dict()
    assert all(tensor.data_ptr() for tensor in want.values())
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in want.items():
        titan = titan_name(name).replace("self_attn.", "attention.").replace("attention.w", "attention.qkv_linear.w")
        stored[titan.replace("qkv_linear.wo", "wo")] = tensor.contiguous()
    for layer in range(2 if fused else 0):
        parts = [stored.pop(f"layers.{layer}.attention.qkv_linear.w{key}.weight").view(2, -1, 6, 12) for key in "qkv"]
        stored[f"layers.{layer}.attention.qkv_linear.wqkv.weight"] = torch.cat(parts, dim=1).reshape(-1, 12).contiguous()
    folder = saved(tmp_path / "a", stored)
    write_config(folder, config.to_dict())
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.tensors.keys() == want.keys()
        assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in want.items())
    write_config(folder, CONFIG)
    assert "which torchtitan's Llama 3 does not have" in refusal(folder).rule


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("layers.0.moe.experts.w1", "mixture of experts"),
        ("layers.0.attention.wkv_a.weight", "latent attention"),
        ("layers.0.attention.sinks", "sinks"),
        ("layers.0.sa_norm.scale", "torchtune"),
        ("layers.0.attention.wq.lora_a.weight", "torchtitan's LoRA"),
    ],
)
def test_other_models_by_torchtitans_names_are_refused_by_name(tmp_path: Path, name: str, what: str) -> None:
    folder = saved(tmp_path, {"tok_embeddings.weight": torch.randn(11, 6), name: torch.randn(2, 3)})
    write_config(folder, CONFIG)
    assert name in refusal(folder).rule
    assert what in refusal(folder).rule


def test_the_angles_that_torchtitan_saved_for_a_while_are_left_out(tmp_path: Path) -> None:
    want, stored = torchtitan(heads=4, groups=2, width=4)
    state = {f"model.{name}": tensor for name, tensor in stored.items()}
    folder = saved(tmp_path / "step-3", state | {"model.freqs_cis": torch.zeros(3, 2, dtype=torch.complex64)})
    write_config(folder, CONFIG)
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.step == 3
        assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in want.items())


@pytest.mark.parametrize("kept", ["whole", "parts"])
def test_torchtitans_last_step_in_safetensors_comes_before_those_in_its_own_files(tmp_path: Path, kept: str) -> None:
    for step in (1, 2):
        saved(tmp_path / f"step-{step}", tensors())
    last = tmp_path / "step-3"
    if kept == "whole":
        last.mkdir()
        save_file(tensors(), last / "model.safetensors")
        write_config(last)
    else:
        shards = last / "sharded"
        shards.mkdir(parents=True)
        sharding = {name: {"saved_offsets": [0, 0]} for name in tensors()}
        save_file(
            tensors(), shards / "shard-00001-model-00001-of-00001.safetensors", {"DCP_SHARDING_INFO": json.dumps(sharding)}
        )
        write_config(last)
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.step == 3
        assert checkpoint.path == (last if kept == "whole" else last / "sharded")
    (tmp_path / "outputs").mkdir()
    for folder in tmp_path.glob("step-*"):
        (tmp_path / "outputs" / "checkpoint").mkdir(exist_ok=True)
        folder.rename(tmp_path / "outputs" / "checkpoint" / folder.name)
    with open_checkpoint(tmp_path / "outputs") as checkpoint:
        assert checkpoint.step == 3
    for step in (1, 2):
        shutil.rmtree(tmp_path / "outputs" / "checkpoint" / f"step-{step}")
    with open_checkpoint(tmp_path / "outputs") as checkpoint:
        assert checkpoint.step == 3


def hugging_face(folder: Path, *left_out: str) -> Path:
    folder.mkdir(parents=True)
    for number, (name, tensor) in enumerate(tensors().items(), start=1):
        save_file({name: tensor}, folder / f"model-{number:05d}-of-00002.safetensors")
    where = {name: f"model-{number:05d}-of-00002.safetensors" for number, name in enumerate(tensors(), start=1)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    for name in left_out:
        (folder / name).unlink()
    return write_config(folder)


@pytest.mark.parametrize(
    ("ours", "theirs", "left_out"),
    [
        ("pytorch_model_fsdp_0", "checkpoint-7", ()),
        ("epoch_5", "checkpoint-3", ()),
        ("epoch_5", "step-30", ()),
        ("checkpoint-5", "step-30", ()),
        ("step-5", "checkpoint-30", ()),
        ("step-5", "step-4", ()),
        ("step-5", "step-30", ("model-00002-of-00002.safetensors",)),
        ("step-5", "step-30", ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")),
    ],
)
def test_no_other_folder_in_safetensors_comes_before(tmp_path: Path, ours: str, theirs: str, left_out: tuple[str, ...]) -> None:
    saved(tmp_path / ours, tensors())
    hugging_face(tmp_path / theirs, *left_out)
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.path == tmp_path / ours


def test_a_folder_that_is_a_link_to_itself_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "checkpoint").symlink_to(".")
    assert "is no checkpoint of a known layout" in refusal(tmp_path).rule
    assert "is no checkpoint of a known layout" in refusal(tmp_path / "a").rule


def test_rows_can_be_picked_in_any_order(tmp_path: Path) -> None:
    parts = joined(0, [("a", Extent("F32", (5, 2), (2, 1), 0)), ("a", Extent("F32", (6, 2), (2, 1), 40))])
    (tmp_path / "a").write_bytes(torch.arange(22.0).numpy().tobytes())
    runs = [range(7, 11), range(0, 9, 3), range(1, 2), range(2, 11, 2)]
    with open(tmp_path / "a", "rb") as file:
        got, num_bytes = read_stored({"a": file.fileno()}, parts.picked(runs), None, dtype=None, device="cpu")
    assert torch.equal(got, torch.arange(22.0).view(11, 2)[[row for run in runs for row in run]])
    assert num_bytes == got.nbytes


def test_what_a_save_lost_is_named(tmp_path: Path) -> None:
    folder = saved(tmp_path / "a", tensors())
    shutil.copytree(folder, tmp_path / "b", ignore=shutil.ignore_patterns(".metadata"))
    assert "hidden file" in refusal(tmp_path / "b").rule
    (folder / "__0_0.distcp").unlink()
    assert refusal(folder).file == "__0_0.distcp"


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda t: [setattr(v, "transform_descriptors", ["stream.zstd/1"]) for v in t.storage_data.values()], "zstd"),
        (lambda t: t.state_dict_metadata[MODEL].chunks.clear(), "no element"),
        (lambda t: [setattr(v, "relative_path", "../up") for v in t.storage_data.values()], "no file of the folder"),
        (lambda t: [setattr(v, "length", 40) for v in t.storage_data.values()], "zip archive"),
        (lambda t: setattr(t.state_dict_metadata[MODEL], "size", torch.Size([12, 6])), "66 of 72 elements"),
        (lambda t: t.state_dict_metadata[MODEL].chunks.append(box(1, 6)), "once"),
        (lambda t: setattr(t.state_dict_metadata[MODEL].properties, "dtype", torch.float8_e4m3fn), "torch.float8_e4m3fn"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(tmp_path: Path, change: Callable[[Any], None], rule: str) -> None:
    folder = saved(tmp_path / "a", tensors())
    remade(folder, change)
    assert rule in refusal(folder).rule


def test_a_type_that_is_not_read_is_refused_with_the_tensors_name(tmp_path: Path) -> None:
    folder = saved(tmp_path / "a", tensors() | {"transformer.scale": torch.ones(3, dtype=torch.uint16)})
    assert "'transformer.scale' is of torch.uint16" in refusal(folder).rule


def test_nothing_that_a_table_names_is_run(tmp_path: Path) -> None:
    folder = saved(tmp_path / "a", tensors())
    (folder / ".metadata").write_bytes(b"\x80\x04cos\nsystem\nX\x04\x00\x00\x00truetR.")
    assert refusal(folder).file == ".metadata"


def shard(folder: Path, rank: int, held: dict[str, torch.Tensor], starts: dict[str, list[int]]) -> None:
    info = json.dumps({name: {"saved_offsets": start} for name, start in starts.items()})
    folder.mkdir(exist_ok=True)
    save_file(
        held, folder / f"shard-{rank:05d}-model-00001-of-00001.safetensors", {"DCP_SHARDING_INFO": info, "DCP_VERSION": "1.0"}
    )


def test_the_parts_that_ranks_write_in_safetensors_are_put_where_they_say(tmp_path: Path) -> None:
    folder = tmp_path / "sharded"
    full = tensors()[MODEL]
    shard(folder, 1, {MODEL: full[5:].clone()}, {MODEL: [5, 0]})
    write_config(folder)
    assert "55" in refusal(folder).rule or "hold" in refusal(folder).rule
    shard(folder, 2, {MODEL: full[:5].clone()}, {MODEL: [0, 0]})
    assert_opens(folder, {MODEL: full})
    write_config(tmp_path)
    assert_opens(tmp_path, {MODEL: full})
    (folder / "shard-00002-model-00001-of-00001.safetensors").rename(folder / "shard-00003-model-00001-of-00001.safetensors")
    assert "none of rank 2" in refusal(folder).rule


def test_a_part_under_the_name_of_a_whole_model_is_refused(tmp_path: Path) -> None:
    shard(tmp_path, 1, tensors(), {name: [0, 0] for name in tensors()})
    (tmp_path / "shard-00001-model-00001-of-00001.safetensors").rename(tmp_path / "model.safetensors")
    assert "DCP_SHARDING_INFO" in refusal(write_config(tmp_path)).rule


@pytest.mark.slow
def test_what_four_ranks_save_is_their_models_state_whatever_the_writer(tmp_path: Path) -> None:
    script = Path(__file__).with_name("trainers_dcp.py")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    subprocess.run([*launch, str(script), str(tmp_path)], check=True, capture_output=True, timeout=900)
    expected = torch.load(tmp_path / "expected.pt")
    for writer in ("script", "accelerate", "alone", "titan", "shards"):
        assert_opens(tmp_path / writer, expected["state"], config=str(tmp_path))
    assert "config.json" in refusal(tmp_path / "titan").rule
