"""What a written checkpoint is, and what the writer refuses."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from checkpoint import CheckpointError, CheckpointWriter, open_checkpoint, resolve_latest
from checkpoint.writing import shards as shards_module
from tests.checkpoint.folders import CONFIG, assert_holds, seed_of, some_tensors, written


def left_in(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_a_written_checkpoint_is_a_plain_sharded_folder_with_a_manifest(tmp_path: Path) -> None:
    folder = written(tmp_path / "run", 12, extra={"tokens": 5})
    assert left_in(tmp_path / "run") == ["latest", "step-00000012"]
    assert (tmp_path / "run" / "latest").read_text() == "step-00000012\n"
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    assert shards == [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    assert len(shards) > 1
    assert sorted(left_in(folder)) == sorted(
        [*shards, "config.json", "generation_config.json", "manifest.json", "model.safetensors.index.json", "tokenizer.json"]
    )
    by_hand = {name: tensor for shard in shards for name, tensor in load_file(folder / shard).items()}
    assert all(torch.equal(by_hand[name], tensor) for name, tensor in some_tensors().items())

    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["step"] == 12
    assert manifest["extra"] == {"tokens": 5}
    assert set(manifest["files"]) == set(left_in(folder)) - {"manifest.json"}
    for name, entry in manifest["files"].items():
        data = (folder / name).read_bytes()
        assert entry == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def test_it_opens_again_by_its_folder_and_by_its_root(tmp_path: Path) -> None:
    folder = written(tmp_path / "run", 3)
    for path in (folder, tmp_path / "run"):
        with open_checkpoint(path, verify="sha256") as checkpoint:
            assert_holds(checkpoint, some_tensors())
            assert checkpoint.step == 3
            assert checkpoint.path == folder
            assert checkpoint.config == CONFIG
            assert checkpoint.generation_config == {"eos_token_id": 10}
            assert checkpoint.tokenizer_vocab_size == 11
            assert checkpoint.manifest is not None
            assert checkpoint.manifest.tensors["scale"].dtype == "F32"


def test_a_model_that_fits_one_shard_is_one_file_without_an_index(tmp_path: Path) -> None:
    folder = written(tmp_path / "run", max_shard_bytes=1 << 20)
    assert [path.name for path in folder.glob("model*")] == ["model.safetensors"]
    with open_checkpoint(folder) as checkpoint:
        assert_holds(checkpoint, some_tensors())


def test_commit_returns_the_folder_and_ends_the_writer(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, step=0, config=CONFIG)
    writer.add("w", torch.ones(2))
    assert writer.commit() == tmp_path / "step-00000000"
    writer.abort()
    assert left_in(tmp_path) == ["latest", "step-00000000"]
    for use in (writer.commit, lambda: writer.add("v", torch.ones(2))):
        with pytest.raises(ValueError, match="has committed or aborted"):
            use()


def test_an_exception_in_the_block_leaves_nothing(tmp_path: Path) -> None:
    written(tmp_path / "run", 1)
    writer = CheckpointWriter(tmp_path / "run", step=2, config=CONFIG)
    writer.add("w", torch.ones(2))
    with pytest.raises(ZeroDivisionError), writer:
        _ = 1 / 0
    assert left_in(tmp_path / "run") == ["latest", "step-00000001"]


def test_latest_can_be_left_as_it_is(tmp_path: Path) -> None:
    written(tmp_path / "run", 1)
    written(tmp_path / "run", 2, update_latest=False)
    assert resolve_latest(tmp_path / "run").name == "step-00000001"


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    folder = written(tmp_path / "run", 1, seed=0)
    with open_checkpoint(folder) as before:
        written(tmp_path / "run", 1, seed=1)
        assert seed_of(folder, (0, 1)) == 1
        assert_holds(before, some_tensors(0))  # whoever had it open reads on
    assert left_in(tmp_path / "run") == ["latest", "step-00000001"]


def test_saving_a_step_again_where_names_cannot_be_exchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("checkpoint.disk.durable._exchange", lambda one, other: False)
    folder = written(tmp_path / "run", 1, seed=0)
    written(tmp_path / "run", 1, seed=1)
    assert seed_of(folder, (0, 1)) == 1
    assert left_in(tmp_path / "run") == ["latest", "step-00000001"]


def test_tensors_that_are_not_contiguous_are_written_in_order_and_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = torch.Generator().manual_seed(6)
    base = torch.randn(9, 10, 11, generator=make)
    tensors = {"turned": base.permute(2, 0, 1), "cut": base[::2, 1:7, ::3], "repeated": torch.ones(1).expand(40), "whole": base}
    for piece_bytes in (4, 64, 1000, 1 << 20):
        monkeypatch.setattr(shards_module, "COPY_BYTES", piece_bytes)
        with CheckpointWriter(tmp_path, step=piece_bytes, config=CONFIG) as writer:
            for name, tensor in tensors.items():
                writer.add(name, tensor)
        with open_checkpoint(tmp_path) as checkpoint:
            assert_holds(checkpoint, tensors)


def test_a_parameter_may_change_once_it_is_added(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(5))
    with CheckpointWriter(tmp_path, step=1, config=CONFIG) as writer:
        writer.add("w", weight)
        weight.data.zero_()
    with open_checkpoint(tmp_path) as checkpoint:
        assert torch.equal(checkpoint.read("w"), torch.ones(5))


def test_a_full_header_ends_its_shard(tmp_path: Path) -> None:
    tensors = {f"transformer.h.{number}.{'long' * 20}.weight": torch.full((1,), float(number)) for number in range(600)}
    with CheckpointWriter(tmp_path, step=1, config=CONFIG) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
    assert len(list((tmp_path / "step-00000001").glob("model-*.safetensors"))) > 1
    with open_checkpoint(tmp_path) as checkpoint:
        assert_holds(checkpoint, tensors)


@pytest.mark.parametrize(
    ("name", "tensor", "rule"),
    [
        ("w", torch.ones(1), "added twice"),
        ("__metadata__", torch.ones(1), "keeps that name"),
        ("v", torch.ones(0, 3), "ZeRO-3"),
        ("v", torch.ones(2, dtype=torch.complex64), "cannot be kept"),
        ("v", torch.ones(2, device="meta"), "cannot be kept"),
        ("v", torch.ones(2, 2).to_sparse(), "cannot be kept"),
        ("v" * 100_000, torch.ones(1), "name takes"),
    ],
)
def test_a_tensor_that_cannot_be_kept_is_refused(tmp_path: Path, name: str, tensor: torch.Tensor, rule: str) -> None:
    writer = CheckpointWriter(tmp_path, step=1, config=CONFIG)
    writer.add("w", torch.ones(1))
    with pytest.raises(CheckpointError, match=rule), writer:
        writer.add(name, tensor)
    assert left_in(tmp_path) == []


def test_a_checkpoint_without_tensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no tensor"), CheckpointWriter(tmp_path, step=1, config=CONFIG):
        pass
    assert left_in(tmp_path) == []


@pytest.mark.parametrize(
    ("options", "error", "rule"),
    [
        ({"step": -1}, ValueError, "step is -1"),
        ({"step": True}, ValueError, "step is True"),
        ({"max_shard_bytes": 0}, ValueError, "max_shard_bytes is 0"),
        ({"config": {}}, CheckpointError, "model_type"),
        ({"config": {"model_type": "gpt2", "auto_map": {}}}, CheckpointError, "auto_map"),
        ({"config": {"model_type": "gpt2", "x": {1}}}, CheckpointError, "config.json: cannot be written as JSON"),
        ({"extra": {"x": object()}}, CheckpointError, "manifest.json: cannot be written as JSON"),
        ({"tokenizer_files": [Path("/nowhere/tokenizer.json")]}, CheckpointError, "there is no such file"),
        ({"tokenizer_files": [Path("/nowhere/config.json")]}, CheckpointError, "has its own file"),
        ({"expected_bytes": 1 << 60}, CheckpointError, "bytes free"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_written(
    tmp_path: Path, options: dict[str, object], error: type[Exception], rule: str
) -> None:
    with pytest.raises(error, match=rule):
        CheckpointWriter(tmp_path, **({"step": 1, "config": CONFIG} | options))
    assert left_in(tmp_path) == []


def test_a_disk_too_full_is_noticed_before_the_tensor_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    writer = CheckpointWriter(tmp_path, step=1, config=CONFIG)
    writer.add("w", torch.ones(10))
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(10_000, 5_201, 4_799))
    with pytest.raises(CheckpointError, match="needs 4800 bytes free"), writer:
        writer.add("v", torch.ones(1000))
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_an_error_at_any_step_on_disk_leaves_the_previous_checkpoint(tmp_path: Path, number: int) -> None:
    """Every step of a save is made to fail once; steps that come after the new folder counts may leave that one."""
    total = 0

    def count(what: str) -> None:
        nonlocal total
        total += 1

    written(tmp_path / "dry", 1)
    written(tmp_path / "dry", 2, seed=1, before_step=count)
    assert total > 20
    for fails_at in range(total):
        root = tmp_path / f"run{fails_at}"
        written(root, 1, seed=0)
        steps: list[str] = []

        def fail(what: str, steps: list[str] = steps, fails_at: int = fails_at) -> None:
            steps.append(what)
            if len(steps) == fails_at + 1:
                raise OSError(number, os.strerror(number))

        with pytest.raises(CheckpointError) as caught:
            written(root, 2, seed=1, before_step=fail)
        assert os.strerror(number) in caught.value.rule
        assert not [name for name in left_in(root) if ".tmp-" in name or ".old-" in name], steps
        assert seed_of(root, (0, 1)) == (1 if steps[fails_at] == f"flush {root.name}" and "rename latest" in steps else 0)
        if "step-00000002" in left_in(root):
            assert seed_of(root / "step-00000002", (1,)) == 1


def test_leftovers_of_a_dead_writer_are_removed_and_those_of_a_living_one_are_not(tmp_path: Path) -> None:
    dead = tmp_path / f"step-00000007.tmp-{'a' * 32}"
    dead.mkdir()
    (dead / "shard-00000.part").write_bytes(b"x")
    (tmp_path / f"latest.tmp-{'b' * 32}").write_text("step-00000007")
    (tmp_path / "notes.tmp-mine").mkdir()
    living = CheckpointWriter(tmp_path, step=5, config=CONFIG)
    living.add("w", torch.ones(2))
    with CheckpointWriter(tmp_path, step=6, config=CONFIG) as writer:
        writer.add("w", torch.ones(3))
    living.commit()
    assert left_in(tmp_path) == ["latest", "notes.tmp-mine", "step-00000005", "step-00000006"]


def test_a_checkpoint_set_aside_by_a_dead_writer_counts_and_is_put_back(tmp_path: Path) -> None:
    folder = written(tmp_path / "run", 1, seed=0)
    folder.rename(folder.with_name(f"{folder.name}.old-{'c' * 32}"))
    assert seed_of(tmp_path / "run", (0, 1)) == 0
    written(tmp_path / "run", 2, seed=1)
    assert left_in(tmp_path / "run") == ["latest", "step-00000001", "step-00000002"]
    assert seed_of(folder, (0, 1)) == 0


def test_a_checkpoint_set_aside_and_replaced_is_removed(tmp_path: Path) -> None:
    folder = written(tmp_path / "run", 1, seed=0)
    folder.rename(folder.with_name(f"{folder.name}.old-{'c' * 32}"))
    os.rename(written(tmp_path / "other", 1, seed=1), folder)
    assert seed_of(tmp_path / "run", (0, 1)) == 1
    written(tmp_path / "run", 2, seed=1)
    assert left_in(tmp_path / "run") == ["latest", "step-00000001", "step-00000002"]
    assert seed_of(folder, (0, 1)) == 1
