"""A run's data are known by what they hold: touched, moved or downloaded again they are the same; a real change is told."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from checkpoint.disk.content import WHOLE_BYTES, sampled_sha256
from finetune.config.load import load_config
from finetune.data.prepare import Prepared, prepare
from finetune.data.resumed import agreed_data
from finetune.errors import ConfigError
from finetune.launch.prerequisites import make_ready
from finetune.train.changes import check_settings
from tests.finetune.support import small_run, write_config, write_text_folder


def quiet(_: str) -> None:
    """Nobody listens."""


def config_of(folder: Path, text: Path, **data: Any) -> Any:
    """A run in ``folder`` on ``text``; ``data`` is laid over its section."""
    tree = small_run(text, folder / "run", data=data)
    return load_config(write_config(tree, folder / "run.yaml"))


def prepared(folder: Path, text: Path, **data: Any) -> Prepared:
    return prepare(config_of(folder, text, **data), quiet)


def resumed(folder: Path, text: Path, saved: Prepared, **data: Any) -> Prepared:
    """Prepare the data as a run does that goes on from a save made with ``saved``."""
    config = config_of(folder, text, **data)
    settings = {"data": saved.fingerprint, "data.seq_len": saved.seq_len, "data.seed": 0}
    return agreed_data(config, prepare(config, quiet), settings, quiet)


def touch(text: Path) -> None:
    for file in text.iterdir():
        os.utime(file, ns=(1, 1))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text_folder(tmp_path / "text", files=3, lines=40)


def test_data_that_were_touched_moved_or_copied_are_the_same(tmp_path: Path, text: Path) -> None:
    first = prepared(tmp_path, text)
    ids = Path(first.shards[0]) / "ids.bin"
    made = ids.stat().st_mtime_ns
    touch(text)
    assert prepared(tmp_path, text) == first
    moved = tmp_path / "elsewhere" / "corpus"
    moved.parent.mkdir()
    text.rename(moved)
    assert prepared(tmp_path, moved) == first
    shutil.copytree(moved, tmp_path / "copy")
    assert prepared(tmp_path, tmp_path / "copy") == first
    assert ids.stat().st_mtime_ns == made, "nothing is tokenised again"
    unit = json.loads((ids.parent / "facts.json").read_text())["unit"]
    assert {Path(part["file"]).parent for part in unit} == {tmp_path / "copy"}, "messages name the files where they lie"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda text: (text / "module_1.py").write_text("x = 1\n" * 40), r"module_1\.py: changed, was [\d,]+ bytes, is 240"),
        (lambda text: (text / "module_3.py").write_text("x = 1\n"), r"module_3\.py: new, 6 bytes"),
        (lambda text: (text / "module_0.py").unlink(), r"module_0\.py: gone, [\d,]+ bytes"),
        (lambda text: (text / "module_0.py").rename(text / "z.py"), r"z\.py: renamed, was module_0\.py"),
    ],
    ids=["content", "new", "gone", "renamed"],
)
def test_a_real_change_is_told_as_file_and_kind(tmp_path: Path, text: Path, change: Any, told: str) -> None:
    first = prepared(tmp_path, text)
    change(text)
    with pytest.raises(ConfigError, match=rf"run\.resume: the data of .* changed: {told}.*--data\.changed accept"):
        resumed(tmp_path, text, first)


def test_a_byte_for_byte_exchange_is_told_too(tmp_path: Path, text: Path) -> None:
    first = prepared(tmp_path, text)
    file = text / "module_2.py"
    file.write_bytes(file.read_bytes()[::-1])
    with pytest.raises(ConfigError, match=r"module_2\.py: changed, other content of the same size; the tokenizer or"):
        resumed(tmp_path, text, first)


def test_another_layout_of_the_same_files_is_told_by_its_keys(tmp_path: Path, text: Path) -> None:
    first = prepared(tmp_path, text)
    with pytest.raises(ConfigError, match=r"changed: data\.seq_len: was 32, is 48; they must"):
        resumed(tmp_path, text, first, seq_len=48)
    with pytest.raises(ConfigError, match=r"changed: data\.seed: was 0, is 5; they must"):
        resumed(tmp_path, text, first, seed=5)
    (Path(first.folder) / "made_of.json").unlink()  # as earlier releases left it
    with pytest.raises(ConfigError, match=r"changed: data\.seed: was 0, is 5; they must"):
        resumed(tmp_path, text, first, seed=5)
    (text / "module_1.py").unlink()
    with pytest.raises(ConfigError, match="no file can be named"):
        resumed(tmp_path, text, first)


def test_tokens_an_earlier_release_laid_out_stand_for_its_files(tmp_path: Path, text: Path) -> None:
    from finetune.data.made_of import read_made_of

    first = prepared(tmp_path, text)
    made_of = read_made_of(Path(first.folder))
    assert made_of is not None
    tokens = Path(first.shards[0]).parent
    tokens.rename(tokens.with_name("by-path-and-time"))
    settings = {"data": made_of.renamed(["by-path-and-time"])}
    touch(text)
    config = config_of(tmp_path, text)
    again = agreed_data(config, prepare(config, quiet), settings, quiet)
    assert again.known_as == (settings["data"],)
    ids = tokens.with_name("by-path-and-time") / Path(first.shards[0]).name / "ids.bin"
    ids.write_bytes(ids.read_bytes()[::-1])
    with pytest.raises(ConfigError, match="no file can be named"):
        agreed_data(config, prepare(config, quiet), settings, quiet)


def test_preparing_goes_on_where_a_full_disk_left_files_empty(tmp_path: Path, text: Path) -> None:
    first = prepared(tmp_path, text)
    tokens = Path(first.shards[0]).parent
    (tokens / "began").write_text("")
    (tokens / "tmp-began-1").write_text("")
    shutil.rmtree(first.shards[0])
    assert prepared(tmp_path, text) == first
    assert not list(tokens.glob("tmp-*"))


def test_other_targets_and_templates_are_told_by_their_keys(tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "A?"}, {"role": "assistant", "content": "B."}] * 2
    chats.write_text("".join(json.dumps({"messages": turns}) + "\n" for _ in range(20)))
    how = {"pattern": "*", "chat_template": "plain", "seq_len": 256}
    first = prepared(tmp_path, chats, **how)
    with pytest.raises(ConfigError, match=r"changed: data\.train_on: was completion, is last; they"):
        resumed(tmp_path, chats, first, train_on="last", **how)
    with pytest.raises(ConfigError, match=r"changed: the tokenizer or the chat template is another one; they"):
        resumed(tmp_path, chats, first, **{**how, "chat_template": "chatml"})


def save(config: Any, made: Prepared, settings: Mapping[str, Any], step: int = 2) -> None:
    """A checkpoint and a resume state of this run, with one tensor each."""
    import torch

    from checkpoint import CheckpointWriter

    files = [made.tokenizer_folder / name for name in ("tokenizer.json", "tokenizer_config.json")]
    for root, more in (("checkpoints", files), ("resume", [])):
        described = {"config": {"model_type": "gpt2"}, "tokenizer_files": more, "extra": {"settings": dict(settings)}}
        with CheckpointWriter(Path(config.run.output) / root, step=step, **described) as writer:
            writer.add("x", torch.ones(2))


def test_an_allowed_change_keeps_the_tokenizer_that_the_weights_know(tmp_path: Path, text: Path) -> None:
    config = config_of(tmp_path, text)
    first = prepare(config, quiet)
    save(config, first, {"data": first.fingerprint})
    (text / "module_3.py").write_text("class Other:\n    pass\n" * 40)
    tree = small_run(text, tmp_path / "run")
    tree["run"]["resume"] = "auto"
    file = write_config(tree, tmp_path / "run.yaml")
    with pytest.raises(ConfigError, match=r"module_3\.py: new"):
        make_ready(load_config(file), quiet)
    said: list[str] = []
    made = make_ready(load_config(file, [("data.changed", "accept")]), said.append).prepared
    assert made.known_as == (first.fingerprint,)
    assert made.fingerprint != first.fingerprint
    learned = [Path(folder) / "tokenizer.json" for folder in (made.tokenizer, first.tokenizer)]
    assert learned[0].read_bytes() == learned[1].read_bytes()
    assert any("going on with changed data" in line and "module_3.py: new" in line for line in said)
    other = [("data.changed", "accept"), ("tokenizer", "{path: " + str(tmp_path / "other") + "}")]
    (tmp_path / "other").mkdir()
    tokenizer = json.loads(learned[0].read_text())
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:-1]
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="tokenizer: is not the one of "):
        make_ready(load_config(file, other), quiet)


def test_an_allowed_change_holds_for_the_older_save_that_a_damaged_one_gives_way_to(tmp_path: Path, text: Path) -> None:
    config = config_of(tmp_path, text)
    first = prepare(config, quiet)
    save(config, first, {"data": first.fingerprint})
    (text / "module_3.py").write_text("class Other:\n    pass\n" * 40)
    tree = small_run(text, tmp_path / "run")
    tree["run"]["resume"] = "auto"
    accepting = load_config(write_config(tree, tmp_path / "run.yaml"), [("data.changed", "accept")])
    second = make_ready(accepting, quiet).prepared
    save(accepting, second, {"data": second.fingerprint}, step=4)
    made = make_ready(accepting, quiet).prepared
    older = {"data": first.fingerprint, "data.seed": 0}
    check_settings(tmp_path / "resume", older, {"data": made.fingerprint, "data.seed": 0}, made.known_as)


def test_a_large_file_is_known_by_its_size_and_samples(tmp_path: Path) -> None:
    file, size = tmp_path / "large.bin", WHOLE_BYTES + 1000
    file.touch()
    os.truncate(file, size)  # a hole, which takes no room
    first = sampled_sha256(file)
    os.utime(file, ns=(1, 1))
    assert sampled_sha256(file) == first
    for place in (0, size // 2, size - 1):
        with file.open("r+b") as stream:
            stream.seek(place)
            stream.write(b"x")
        changed = sampled_sha256(file)
        assert changed != first
        first = changed
    os.truncate(file, size + 1)
    assert sampled_sha256(file) != first


def test_a_file_that_is_not_so_large_is_known_by_every_byte(tmp_path: Path) -> None:
    file = tmp_path / "whole.bin"
    file.touch()
    os.truncate(file, 24 << 20)
    first = sampled_sha256(file)
    with file.open("r+b") as stream:
        stream.seek((11 << 20) + 12345)
        stream.write(b"x")
    assert sampled_sha256(file) != first
