"""A checkpoint that was changed after it was written is noticed, and the newest whole one is found."""

from __future__ import annotations

import json
import logging
import random
import shutil
from pathlib import Path

import pytest

from checkpoint import CheckpointError, Given, open_checkpoint, resolve_latest
from checkpoint.disk.folder import Folder
from checkpoint.readers.hf import open_weights
from checkpoint.readers.weights import Weights
from tests.checkpoint.folders import flip_bit, plain_folder, seed_of, written


def test_every_flipped_bit_is_found_by_its_hash_and_its_file_is_named(tmp_path: Path) -> None:
    good = written(tmp_path / "run")
    bad = tmp_path / "bad"
    shutil.copytree(good, bad)
    choose = random.Random(11)
    files = sorted(path.name for path in good.iterdir())
    for number in range(300):
        name = files[number % len(files)]
        flip_bit(bad / name, choose.randrange((good / name).stat().st_size), choose.randrange(8))
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(bad, verify="sha256")
        assert caught.value.file == name
        shutil.copy(good / name, bad / name)
    open_checkpoint(bad, verify="sha256").close()


def test_hashes_cannot_be_checked_without_a_manifest(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^manifest\.json: is missing"):
        open_checkpoint(plain_folder(tmp_path), verify="sha256")


def test_an_unknown_way_to_verify_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="verify is 'md5'"):
        open_checkpoint(plain_folder(tmp_path), verify="md5")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors"]
)
def test_a_file_of_another_size_or_gone_is_noticed_without_hashing(tmp_path: Path, name: str) -> None:
    folder = written(tmp_path / "run")
    with open(folder / name, "ab") as file:
        file.write(b" ")
    with pytest.raises(CheckpointError, match=rf"^{name}: has \d+ bytes, manifest\.json says"):
        open_checkpoint(folder)
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=f"^{name}: is missing"):
        open_checkpoint(folder)


def test_a_description_changed_in_its_own_size_is_noticed_without_hashing_the_weights(tmp_path: Path) -> None:
    """Whose digits are the model as much as its weights are."""
    folder = written(tmp_path / "run")
    file = folder / "config.json"
    text = file.read_text()
    other = text.replace("1", "2", 1)
    assert other != text
    file.write_text(other)
    with pytest.raises(CheckpointError, match=r"config\.json: its sha256 is .*: it was changed"):
        open_checkpoint(folder)


def test_shards_of_equal_size_swapped_are_noticed_without_hashing(tmp_path: Path) -> None:
    folder = written(tmp_path / "run")
    first, second, *_ = sorted(folder.glob("*.safetensors"))
    first.rename(folder / "x")
    second.rename(first)
    (folder / "x").rename(second)
    with pytest.raises(CheckpointError, match=f"^{first.name}: "):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("format_version", 99, "format_version is 99; this release reads 1"),
        ("step", 2, "its own hash does not hold"),
        ("step", "1", "its own hash does not hold"),
        ("added", 1, "its own hash does not hold"),
        ("files", [], "lacks a field or has one of the wrong type"),
        ("tensors", {"w": {}}, "lacks a field or has one of the wrong type"),
    ],
)
def test_a_changed_manifest_is_refused(tmp_path: Path, field: str, value: object, rule: str) -> None:
    path = written(tmp_path / "run") / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}, indent=1, sort_keys=True) + "\n")
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path.parent)
    assert caught.value.file == "manifest.json"
    assert rule in caught.value.rule


def test_the_manifest_of_another_checkpoint_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path / "run", 1)
    shutil.copy(plain_folder(tmp_path / "plain") / "model.safetensors", folder)
    for shard in folder.glob("model-*"):
        shard.unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        open_checkpoint(folder)


def test_a_root_falls_back_to_the_newest_whole_checkpoint_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = tmp_path / "run"
    for step in (1, 2, 10):
        written(root, step, seed=step)
    (root / "step-00000010" / "config.json").unlink()
    with caplog.at_level(logging.WARNING):
        assert resolve_latest(root).name == "step-00000002"
        assert "step-00000010: config.json: is missing" in caplog.text
        caplog.clear()
        assert seed_of(root, (1, 2, 10)) == 2
        assert caplog.text == "", "it is said once"
        (root / "step-00000002" / "config.json").unlink()
        assert resolve_latest(root).name == "step-00000001"
    assert "step-00000002: config.json: is missing" in caplog.text, "until it changes"


@pytest.mark.parametrize("text", ["step-00000099\n", "../run\n", "", "\xff", "x" * 10_000])
def test_a_latest_that_names_no_checkpoint_is_not_followed(tmp_path: Path, text: str) -> None:
    written(tmp_path / "run", 1)
    (tmp_path / "run" / "latest").write_text(text, encoding="latin-1")
    assert resolve_latest(tmp_path / "run").name == "step-00000001"


def test_latest_counts_even_where_a_newer_step_is_whole(tmp_path: Path) -> None:
    for step in (1, 2):
        written(tmp_path / "run", step)
    (tmp_path / "run" / "latest").write_text("step-00000001\n")
    assert resolve_latest(str(tmp_path / "run")).name == "step-00000001"


def test_a_root_without_latest_gives_its_newest_step(tmp_path: Path) -> None:
    for step in (9, 10, 100_000_000):
        written(tmp_path / "run", step)
    (tmp_path / "run" / "latest").unlink()
    with open_checkpoint(tmp_path / "run") as checkpoint:
        assert checkpoint.step == 100_000_000


def test_a_root_without_a_whole_checkpoint_names_what_is_wrong_with_each(tmp_path: Path) -> None:
    (written(tmp_path / "run", 1) / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"holds no whole checkpoint \(step-00000001: manifest\.json: is missing\)"):
        open_checkpoint(tmp_path / "run")
    with pytest.raises(CheckpointError, match="cannot be listed"):
        resolve_latest(tmp_path / "none")


def test_a_checkpoint_replaced_while_it_is_opened_is_refused_rather_than_mixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = written(tmp_path / "run", 1, seed=0)

    def replace_first(opened: Folder, given: Given) -> Weights:
        written(tmp_path / "run", 1, seed=1)
        return open_weights(opened, given)

    monkeypatch.setattr("checkpoint.readers.hf.open_weights", replace_first)
    with pytest.raises(CheckpointError, match="was replaced by another save while it was being opened"):
        open_checkpoint(folder)
