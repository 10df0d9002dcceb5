"""A configuration mistake is refused with its place, its key and the rule."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from configuration import Tree, keys_of
from finetune.config import SourceConfig, TuneConfig
from finetune.config.load import READER, load_config
from finetune.errors import ConfigError

GOOD = """\
model:
  new: {model_type: gpt_neox, hidden_size: 64}
tokenizer:
  train:
    vocab_size: 300
data:
  train: text
run:
  output: out
"""


def load(tmp_path: Path, text: str = GOOD, *overrides: tuple[str, str]) -> TuneConfig:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(path, overrides)


def test_a_file_becomes_a_configuration(tmp_path: Path) -> None:
    config = load(tmp_path)
    assert config.data.train == ("text",)
    assert config.model.new == {"model_type": "gpt_neox", "hidden_size": 64}
    assert config.tokenizer.train is not None
    assert config.tokenizer.train.vocab_size == 300


def test_any_key_can_be_overridden_and_the_last_one_counts(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        GOOD,
        ("optimizer.lr", "1e-2"),
        ("optimizer.lr", "1e-3"),
        ("model.new.hidden_size", "128"),
        ("data.train", "[a, b]"),
        ("log.tensorboard", "false"),
        ("batch.total", "32"),
    )
    assert config.optimizer.lr == 1e-3
    assert config.model.new is not None
    assert config.model.new["hidden_size"] == 128
    assert config.data.train == ("a", "b")
    assert config.log.tensorboard is False
    assert config.accumulation == 4


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (GOOD + "zerro: {stage: 3}\n", ["line 10", "unknown key zerro", "did you mean zero", "allowed", "offload"]),
        (GOOD.replace("output: out", "output: out\n  rank: 2"), ["line 10", "unknown key run.rank", "run.ranks", "device"]),
        (GOOD + "zero: {stage: 4}\n", ["line 10", "zero.stage is 4", "1, 2, 3"]),
        (GOOD + "optimizer: {lr: fast}\n", ["line 10", "optimizer.lr is 'fast'", "number"]),
        (GOOD + "optimizer: {lr: -1}\n", ["line 10", "optimizer.lr is -1.0", "greater than 0"]),
        (GOOD + "log: {plot: maybe}\n", ["line 10", "log.plot is 'maybe'", "true or false"]),
        (GOOD + "batch: {micro: 2.5}\n", ["line 10", "batch.micro is 2.5", "whole number"]),
        (GOOD + "zero: {stage: 2}\noffload: {parameters: cpu}\n", ["offload.parameters", "zero.stage is 3"]),
        (GOOD + "batch: {micro: 8, total: 12}\n", ["batch.total is 12", "multiple", "8 x 1"]),
        (GOOD + "batch: {micro: 8, total: 16, accumulation: 3}\n", ["batch.accumulation is 3", "be 2"]),
        (GOOD + "data: {train: other}\n", ["data is set twice"]),
        (GOOD + "zero: 3\n", ["zero is 3", "mapping"]),
        (GOOD.replace("  output: out", "  ranks: 1"), ["run.output", "not set"]),
        (GOOD.replace("tokenizer:\n  train:\n    vocab_size: 300\n", ""), ["tokenizer", "path", "trained"]),
        (GOOD.replace("new: {model_type: gpt_neox, hidden_size: 64}", "new: {hidden_size: 64}"), ["model.new", "model_type"]),
        (GOOD.replace("model:\n  new: {model_type: gpt_neox, hidden_size: 64}\n", ""), ["model", "exactly one"]),
        (GOOD + "save: [1, 2\n", ["not valid YAML", "line"]),
        ("- a\n", ["mapping of keys"]),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, text: str, says: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    message = str(caught.value)
    assert str(tmp_path / "run.yaml") in message
    assert [part for part in says if part not in message] == [], message


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("zero.stge", "3", ["--zero.stge", "unknown key", "stage"]),
        ("zero.stage", "7", ["--zero.stage", "7", "1, 2, 3"]),
        ("batch.micro", "0", ["--batch.micro", "at least 1"]),
        ("batch.micro", "[1", ["--batch.micro", "YAML"]),
    ],
)
def test_a_mistake_on_the_command_line_is_named(tmp_path: Path, name: str, value: str, says: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, GOOD, (name, value))
    assert [part for part in says if part not in str(caught.value)] == [], str(caught.value)


def test_overrides_are_told_from_options() -> None:
    words = ["--data.train", "x", "run.yaml", "--resume", "--run.ranks=2", "--optimizer.lr", "-1"]
    overrides, rest = READER.split(words, ["run", "data"])
    assert overrides == [("data.train", "x"), ("run.ranks", "2"), ("optimizer.lr", "-1")]
    assert rest == ["run.yaml", "--resume"]
    with pytest.raises(ConfigError, match=r"--run\.ranks needs a value"):
        READER.split(["--run.ranks"], ["run"])


def test_every_key_has_a_meaning() -> None:
    undocumented = [key.name for key in keys_of(TuneConfig) if not key.meaning]
    assert undocumented == []


SOURCES = """\
model:
  new: {model_type: gpt_neox}
tokenizer:
  path: somewhere
data:
  train:
    - a.jsonl
    - path: b.jsonl
      weight: 2
run:
  output: out
"""


def test_a_list_holds_words_and_mappings(tmp_path: Path) -> None:
    config = load(tmp_path, SOURCES)
    assert config.data.train == ("a.jsonl", SourceConfig(path="b.jsonl", weight=2.0))
    assert [(source.path, source.weight) for source in config.data.sources("train")] == [("a.jsonl", 1.0), ("b.jsonl", 2.0)]
    assert READER.build(TuneConfig, Tree(json.loads(json.dumps(asdict(config))))) == config, "as the ranks are told it"
    assert "data.train[].weight" in {key.name for key in keys_of(TuneConfig)}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("wieght: 2", "run.yaml, line 9: unknown key data.train[1].wieght; did you mean data.train[1].weight?"),
        ("weight: -1", "run.yaml, line 9: data.train[1].weight is -1.0; it must be greater than 0"),
        ("weight: much", "run.yaml, line 9: data.train[1].weight is 'much'; it must be a number"),
        ("format: poem", "run.yaml, line 9: data.train[1].format is 'poem'; it must be one of auto, text"),
    ],
)
def test_a_mistake_in_a_list_is_named_by_its_entry(tmp_path: Path, wrong: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, SOURCES.replace("weight: 2", wrong))
    assert says in str(caught.value)
