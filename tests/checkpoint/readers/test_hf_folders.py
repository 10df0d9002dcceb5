"""Hugging Face folders: what is read, and what is refused with the file and the rule."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from checkpoint import CheckpointError, TensorInfo, open_checkpoint, open_structure
from tests.checkpoint.folders import (
    CONFIG,
    assert_holds,
    plain_folder,
    raw_safetensors,
    read_index,
    sharded_folder,
    some_tensors,
    write_config,
    write_index,
)
from tests.support.descriptors import descriptors

FIRST, SECOND, INDEX = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"


def refusal(folder: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert str(caught.value) == f"{caught.value.file}: {caught.value.rule}"
    return caught.value


def test_one_file(tmp_path: Path) -> None:
    with open_checkpoint(str(plain_folder(tmp_path))) as checkpoint:
        assert_holds(checkpoint, some_tensors())
        assert checkpoint.tensors["scale"] == TensorInfo("scale", torch.float32, (), "model.safetensors")
        assert checkpoint.config == CONFIG
        assert checkpoint.generation_config == {}
        assert checkpoint.path == tmp_path.resolve()
        assert (checkpoint.step, checkpoint.manifest, checkpoint.tokenizer_vocab_size) == (None, None, None)


def test_shards_with_an_index(tmp_path: Path) -> None:
    with open_checkpoint(sharded_folder(tmp_path)) as checkpoint:
        assert_holds(checkpoint, some_tensors())
        assert checkpoint.tensors["scale"].file == SECOND


def test_torch_archives_with_an_index(tmp_path: Path) -> None:
    tensors = list(some_tensors().items())
    write_config(tmp_path)
    torch.save(dict(tensors[:2]), tmp_path / "pytorch_model-00001-of-00002.bin")
    torch.save(dict(tensors[2:]), tmp_path / "pytorch_model-00002-of-00002.bin")
    weight_map = {name: f"pytorch_model-0000{1 if at < 2 else 2}-of-00002.bin" for at, (name, _) in enumerate(tensors)}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with open_checkpoint(tmp_path) as checkpoint:
        assert_holds(checkpoint, some_tensors())


def test_safetensors_are_preferred_to_torch_archives(tmp_path: Path) -> None:
    (plain_folder(tmp_path) / "pytorch_model.bin").write_bytes(b"never looked at")
    with open_checkpoint(tmp_path) as checkpoint:
        assert_holds(checkpoint, some_tensors())


def test_a_missing_shard(tmp_path: Path) -> None:
    (sharded_folder(tmp_path) / SECOND).unlink()
    assert str(refusal(tmp_path)) == f"{SECOND}: is missing"


def test_a_missing_index(tmp_path: Path) -> None:
    (sharded_folder(tmp_path) / INDEX).unlink()
    assert str(refusal(tmp_path)).startswith(f"{INDEX}: is missing")


def test_a_shard_that_the_index_does_not_list(tmp_path: Path) -> None:
    save_file({"w": torch.ones(1)}, sharded_folder(tmp_path) / "model-00003-of-00003.safetensors")
    error = refusal(tmp_path)
    assert error.file == "model-00003-of-00003.safetensors"
    assert "does not list" in error.rule


def test_swapped_shards(tmp_path: Path) -> None:
    sharded_folder(tmp_path)
    (tmp_path / FIRST).rename(tmp_path / "x")
    (tmp_path / SECOND).rename(tmp_path / FIRST)
    (tmp_path / "x").rename(tmp_path / SECOND)
    error = refusal(tmp_path)
    assert error.file == FIRST
    assert "swapped" in error.rule


def test_a_tensor_that_the_index_does_not_list(tmp_path: Path) -> None:
    weight_map = read_index(sharded_folder(tmp_path))
    del weight_map["scale"]
    write_index(tmp_path, weight_map)
    error = refusal(tmp_path)
    assert error.file == SECOND
    assert "'scale'" in error.rule


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    sharded_folder(tmp_path)
    kept = {name: tensor for name, tensor in some_tensors().items() if read_index(tmp_path)[name] == SECOND}
    save_file(kept | {"transformer.wte.weight": torch.ones(2)}, tmp_path / SECOND)
    error = refusal(tmp_path)
    assert error.file == SECOND
    assert "which model.safetensors.index.json puts in" in error.rule


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd.safetensors", "a/b.safetensors", "..\\x.safetensors", "\0.safetensors"]
)
def test_an_index_that_names_a_file_outside(tmp_path: Path, name: str) -> None:
    folder = sharded_folder(tmp_path / "in")
    plain_folder(tmp_path)
    write_index(folder, dict.fromkeys(some_tensors(), name))
    for shard in (FIRST, SECOND):
        (folder / shard).unlink()
    assert "plain name" in refusal(folder).rule


@pytest.mark.parametrize("weight_map", [None, {}, [], {"w": 3}, {"w": "model.bin"}])
def test_an_index_that_is_not_one(tmp_path: Path, weight_map: object) -> None:
    write_index(write_config(tmp_path), weight_map)
    assert refusal(tmp_path).file == INDEX


def test_one_file_and_shards_side_by_side(tmp_path: Path) -> None:
    plain_folder(sharded_folder(tmp_path))
    error = refusal(tmp_path)
    assert error.file == "model.safetensors"
    assert "cannot be told" in error.rule


def test_no_weights(tmp_path: Path) -> None:
    assert refusal(write_config(tmp_path)).file == "model.safetensors"


def test_weights_of_a_name_that_is_not_known_are_shown(tmp_path: Path) -> None:
    plain_folder(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "model.fp16.safetensors")
    assert f"{tmp_path} holds config.json, model.fp16.safetensors" in refusal(tmp_path).rule


@pytest.mark.parametrize("with_config", [False, True])
def test_of_a_trainers_numbered_folders_the_highest_with_weights_counts(tmp_path: Path, with_config: bool) -> None:
    for name in ("checkpoint-9", "checkpoint-100", "checkpoint-20"):
        plain_folder(tmp_path / name)
    write_config(tmp_path / "checkpoint-300")  # interrupted before there were weights
    if with_config:
        write_config(tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.path == tmp_path / "checkpoint-100"
        assert checkpoint.step == 100
    plain_folder(tmp_path)  # the trainer's last word
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.path == tmp_path
        assert checkpoint.step is None


def test_no_folder_and_a_file_in_its_place(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none").rule == "there is no such folder"
    (tmp_path / "file").write_text("")
    assert refusal(tmp_path / "file").rule == "is not a folder; name the one that it is in"


@pytest.mark.parametrize("inside", [False, True])
def test_a_tokenizer_in_a_folder_of_its_own_is_another_models(tmp_path: Path, inside: bool) -> None:
    folder = plain_folder(tmp_path / "model")
    other = (folder if inside else tmp_path) / "tokenizer"
    other.mkdir()
    (other / "tokenizer.json").write_text("{}")
    with open_structure(folder) as structure:
        assert structure.tokenizer.path == folder


def test_folders_inside_that_have_a_checkpoint_are_named(tmp_path: Path) -> None:
    plain_folder(tmp_path / "mine" / "checkpoint-3")
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / "__0_0.distcp").write_bytes(b"")
    (tmp_path / "logs").mkdir()
    assert "; mine and unfinished in it may be meant. Known are" in refusal(tmp_path).rule


def test_an_empty_folder_lacks_its_config(tmp_path: Path) -> None:
    assert "is empty, which is no checkpoint of a known layout. Known are: PEFT" in str(refusal(tmp_path))


def test_a_link_out_of_the_folder(tmp_path: Path) -> None:
    plain_folder(tmp_path / "elsewhere")
    write_config(tmp_path / "here")
    (tmp_path / "here" / "model.safetensors").symlink_to(tmp_path / "elsewhere" / "model.safetensors")
    assert str(refusal(tmp_path / "here")) == "model.safetensors: is a link that leaves the checkpoint's folder"


def test_links_of_a_hugging_face_cache_are_followed_to_its_blobs_only(tmp_path: Path) -> None:
    snapshot = plain_folder(tmp_path / "models--a--b" / "snapshots" / "0f0f")
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir()
    (snapshot / "model.safetensors").rename(blobs / "abcd")
    (snapshot / "model.safetensors").symlink_to("../../blobs/abcd")
    with open_checkpoint(snapshot) as checkpoint:
        assert_holds(checkpoint, some_tensors())
    (blobs / "abcd").rename(tmp_path / "abcd")
    (blobs / "abcd").symlink_to(tmp_path / "abcd")
    assert "leaves" in refusal(snapshot).rule


def test_a_link_to_the_folder_itself_is_followed(tmp_path: Path) -> None:
    plain_folder(tmp_path / "real")
    (tmp_path / "link").symlink_to("real")
    with open_checkpoint(tmp_path / "link") as checkpoint:
        assert checkpoint.path == (tmp_path / "real").resolve()


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "config.json"])
def test_what_git_lfs_has_not_fetched_is_told(name: str, tmp_path: Path) -> None:
    plain_folder(tmp_path)
    if name.endswith(".bin"):
        (tmp_path / "model.safetensors").unlink()
    (tmp_path / name).write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 5\n")
    with pytest.raises(CheckpointError, match=rf"^{name}: .*`git lfs pull` there fetches the file"):
        open_structure(tmp_path)


def test_a_pipe_does_not_make_opening_wait(tmp_path: Path) -> None:
    write_config(tmp_path)
    os.mkfifo(tmp_path / "model.safetensors")
    assert str(refusal(tmp_path)) == "model.safetensors: is not a regular file"


@pytest.mark.parametrize(
    ("config", "rule"),
    [
        ([], "must hold a JSON object, not list"),
        ({}, "model_type is None"),
        ({"model_type": 3}, "model_type is 3"),
        ({"model_type": "mpt", "auto_map": {"AutoModel": "modeling.Model"}}, "never done"),
        ({"model_type": "gpt2", "quantization_config": {"bits": 4}}, "quantised"),
    ],
)
def test_a_config_that_is_none(tmp_path: Path, config: object, rule: str) -> None:
    plain_folder(tmp_path)
    write_config(tmp_path, config)
    error = refusal(tmp_path)
    assert error.file == "config.json"
    assert rule in error.rule


@pytest.mark.parametrize("text", [b"", b"{", b"\xff", b"[" * 100_000, b'{"model_type": "gpt2", "model_type": "opt"}'])
def test_a_config_that_is_no_json(tmp_path: Path, text: bytes) -> None:
    (plain_folder(tmp_path) / "config.json").write_bytes(text)
    assert refusal(tmp_path).file == "config.json"


def test_a_generation_config_that_is_none(tmp_path: Path) -> None:
    (plain_folder(tmp_path) / "generation_config.json").write_text("[]")
    assert refusal(tmp_path).file == "generation_config.json"


W = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "data", "length", "rule"),
    [
        ({"w": W}, b"\0" * 8, 1 << 40, "at most 100000000"),
        ({"w": W}, b"\0" * 8, 99_000_000, "is cut short: its header"),
        ({"w": W}, b"\0" * 7, None, "is cut short: its tensors take 8"),
        ({"w": W}, b"\0" * 9, None, "1 bytes after its last tensor"),
        ({}, b"", None, "holds no tensor"),
        (b"[]", b"", None, "not a JSON object"),
        (b"{]", b"", None, "not valid JSON"),
        (b'{"w": 1, "w": 2}', b"", None, "'w' is given twice"),
        ({"w": 3}, b"", None, "must have dtype, shape and data_offsets"),
        ({"w": W | {"more": 1}}, b"\0" * 8, None, "must have dtype, shape and data_offsets"),
        ({"w": W | {"dtype": "F8_E4M3"}}, b"\0" * 8, None, "'F8_E4M3', as quantised weights have; supported are F64"),
        ({"w": W | {"dtype": []}}, b"\0" * 8, None, "has dtype []"),
        ({"w": W | {"shape": [-2]}}, b"\0" * 8, None, "list of counts"),
        ({"w": W | {"shape": [True, 2]}}, b"\0" * 8, None, "list of counts"),
        ({"w": W | {"shape": [3]}}, b"\0" * 8, None, "is 12 bytes, its offsets give 8"),
        ({"w": W | {"shape": [1 << 62, 1 << 62]}}, b"\0" * 8, None, "its offsets give 8"),
        ({"w": W | {"shape": [0], "data_offsets": [0, 0]}}, b"", None, "ZeRO-3"),
        ({"w": W | {"data_offsets": [8, 0]}}, b"\0" * 8, None, "a begin and an end"),
        ({"w": W | {"data_offsets": [0, 8, 9]}}, b"\0" * 8, None, "a begin and an end"),
        ({"w": W, "v": W | {"data_offsets": [4, 12]}}, b"\0" * 12, None, "inside the tensor before it"),
        ({"w": W, "v": W | {"data_offsets": [12, 20]}}, b"\0" * 20, None, "belong to no tensor"),
    ],
)
def test_a_safetensors_file_that_breaks_a_rule(
    tmp_path: Path, header: object, data: bytes, length: int | None, rule: str
) -> None:
    raw_safetensors(write_config(tmp_path) / "model.safetensors", header, data, length=length)
    error = refusal(tmp_path)
    assert error.file == "model.safetensors"
    assert rule in error.rule


def test_a_safetensors_file_cut_anywhere(tmp_path: Path) -> None:
    path = plain_folder(tmp_path) / "model.safetensors"
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        assert refusal(tmp_path).file == "model.safetensors"


def test_a_refused_folder_leaves_no_file_open(tmp_path: Path) -> None:
    with open(sharded_folder(tmp_path) / SECOND, "ab") as file:
        file.write(b"x")
    before = descriptors()
    refusal(tmp_path)
    assert descriptors() <= before


def test_an_archive_without_entries_is_refused(tmp_path: Path) -> None:
    directory = b"PK\x05\x06" + bytes(12) + (64).to_bytes(4, "little") + bytes(2)
    (write_config(tmp_path) / "pytorch_model.bin").write_bytes(bytes(64) + directory)
    with pytest.raises(CheckpointError, match=r"^pytorch_model\.bin: .*it holds 0$"):
        open_checkpoint(tmp_path)
