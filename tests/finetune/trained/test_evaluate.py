"""``evaluate`` measures every format that ``tune`` takes, on the targets that ``tune`` would train on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checkpoint import Given
from finetune.cli import main
from finetune.config import DataConfig, ModelConfig, RunConfig, TokenizerConfig, TuneConfig
from finetune.data.prepare import prepare
from finetune.data.rows import open_rows
from finetune.model.loss import token_losses
from finetune.trained.evaluate import Evaluation, evaluate
from finetune.trained.export import export
from finetune.trained.open import open_trained
from tests.support.models import save

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "read the path"},
    {"role": "assistant", "content": "open it"},
    {"role": "user", "content": "and then"},
    {"role": "assistant", "content": "return what the fox read over there"},
]
RECORDS: dict[str, dict[str, Any]] = {
    "completion": {"prompt": "def read_config(", "completion": "path):\n    return open(path)"},
    "alpaca": {"instruction": "jump over", "input": "the dog", "output": "the quick brown fox jumps"},
    "sharegpt": {"conversations": [{"from": "human", "value": "who jumps"}, {"from": "gpt", "value": "the brown fox"}]},
    "messages": {"messages": CHAT},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save("gpt_neox", tmp_path_factory.mktemp("scored") / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def jsonl(folder: Path, *records: Mapping[str, Any]) -> Path:
    file = folder / "data.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def as_trained(checkpoint: Path, folder: Path, **data: Any) -> tuple[float, int]:
    """Mean loss over the rows that ``tune`` would train on, one sample a row, and the number of targets."""
    config = TuneConfig(
        run=RunConfig(output=str(folder / "run")),
        data=DataConfig(**{"eval_fraction": 0.0, "packing": "none", "seq_len": 200, **data}),
        model=ModelConfig(path=str(checkpoint)),
        tokenizer=TokenizerConfig(path=str(checkpoint)),
    )
    rows = open_rows(prepare(config, lambda _: None), "train")
    batch = rows.rows(np.arange(rows.num_samples))
    model, targets = open_trained(checkpoint, torch.float32).model, torch.from_numpy(batch.targets)
    with torch.no_grad():
        total = float(token_losses(model(input_ids=torch.from_numpy(batch.inputs)).logits, targets))
    return total / int((targets != -100).sum()), int((targets != -100).sum())


def close(result: Evaluation, expected: tuple[float, int]) -> bool:
    return result.tokens == expected[1] and result.loss == pytest.approx(expected[0], rel=1e-5)


@pytest.mark.parametrize("format", RECORDS)
def test_targets_are_those_of_training(checkpoint: Path, tmp_path: Path, format: str) -> None:
    long = {"prompt": "the quick brown fox " * 3, "completion": "jumps"}
    records = [RECORDS[format]] * 3 + ([long] if format == "completion" else [])
    file = jsonl(tmp_path, *records)
    result = evaluate(checkpoint, [str(file)], batch=2)
    assert close(result, as_trained(checkpoint, tmp_path, train=(str(file),)))
    assert (result.samples, result.dropped, result.bits_per_byte) == (len(records), 0, None)


@pytest.mark.parametrize("keys", [{"train_on": "last"}, {"train_on": "all"}, {"train_roles": ("user", "assistant")}])
def test_which_turns_are_targets_can_be_told(checkpoint: Path, tmp_path: Path, keys: dict[str, Any]) -> None:
    file = jsonl(tmp_path, RECORDS["messages"])
    given = [word for key, value in keys.items() for word in (f"--data.{key}", json.dumps(value))]
    plain, told = evaluate(checkpoint, [str(file)]), evaluate(checkpoint, [str(file)], **keys)
    assert close(told, as_trained(checkpoint, tmp_path, train=(str(file),), **keys))
    assert told.tokens != plain.tokens
    assert main(["evaluate", str(checkpoint), "--data", str(file), *given]) == 0


def test_a_runs_checkpoints_are_measured_as_it_was_trained(checkpoint: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    step = run / "checkpoints" / "step-00000001"
    export(checkpoint, step)
    (run / "checkpoints" / "latest").write_text("step-00000001\n")
    (run / "config.yaml").write_text("data: {train: [x], train_on: last, train_roles: [user]}\n")
    file = str(jsonl(tmp_path, RECORDS["messages"]))
    expected = evaluate(checkpoint, [file], train_on="last", train_roles=("user",))
    for path in (run, run / "checkpoints", step):
        assert evaluate(path, [file]) == expected
    assert evaluate(run, [file], train_on="completion", train_roles=("assistant",)) == evaluate(checkpoint, [file])


def test_text_and_samples_are_measured_together(checkpoint: Path, tmp_path: Path) -> None:
    text, chats = tmp_path / "a.txt", jsonl(tmp_path, *[RECORDS["messages"]] * 20)
    text.write_text("the quick brown fox jumps over the lazy dog. " * 20)
    apart = [evaluate(checkpoint, [str(file)], seq_len=128) for file in (text, chats)]
    both = evaluate(checkpoint, [str(text), str(chats), str(text)], seq_len=128)
    assert both.tokens == sum(each.tokens for each in apart), "what is named twice counts once"
    assert both.loss * both.tokens == pytest.approx(sum(each.loss * each.tokens for each in apart), rel=1e-5)
    assert (both.bits_per_byte, both.samples) == (None, 20)


def test_named_keys_are_read_and_plain_text_is_as_before(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "the quick brown fox jumps"
    renamed = jsonl(tmp_path, {"body": words}, {"body": words})
    plain = evaluate(checkpoint, [str(renamed)], text_key="body")
    for number in (1, 2):
        (tmp_path / f"{number}.txt").write_text(words)
    assert main(["evaluate", str(checkpoint), "--data", str(tmp_path), "--pattern", "*.txt", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == asdict(plain)
    assert plain.bits_per_byte is not None
    assert plain.samples == 0


@pytest.mark.parametrize(("too_long", "samples", "dropped"), [("drop", 1, 1), ("cut", 2, 0)])
def test_samples_that_are_too_long_are_treated_as_in_training(
    checkpoint: Path, tmp_path: Path, too_long: str, samples: int, dropped: int, capsys: pytest.CaptureFixture[str]
) -> None:
    file = jsonl(
        tmp_path, {"prompt": "the", "completion": "fox"}, {"prompt": "the", "completion": "quick brown fox jumps " * 9}
    )
    result = evaluate(checkpoint, [str(file)], seq_len=16, too_long=too_long)
    assert close(result, as_trained(checkpoint, tmp_path, train=(str(file),), seq_len=16, too_long=too_long))
    assert (result.samples, result.dropped) == (samples, dropped)
    assert main(["evaluate", str(checkpoint), "--data", str(file), "--seq-len", "16"]) == 2
    assert f"{file}, line 2: has " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--data.packing", "join"], "--data.packing: evaluate takes --data.KEY of format, pattern"),
        (["--run.output", "x"], "--run.output: evaluate takes --data.KEY"),
        (["--data.train_on", "answers"], "data.train_on is 'answers'; it must be one of completion, last, all"),
        (["--data.format", "alpaca"], "data.jsonl, line 1: has no key 'instruction'"),
        (["--data.train_roles", "tool"], "data.jsonl, line 1: has no turn of tool to learn"),
        (["--last-word", "line"], "--last-word: is for text; the data holds prompts or chats"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_key_or_line(
    checkpoint: Path, tmp_path: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = jsonl(tmp_path, RECORDS["messages"])
    assert main(["evaluate", str(checkpoint), "--data", str(file), *words]) == 2
    assert says in " ".join(capsys.readouterr().err.split())


def test_chats_need_a_template(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare = shutil.copytree(checkpoint, tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    file = jsonl(tmp_path, RECORDS["messages"])
    assert main(["evaluate", str(bare), "--data", str(file)]) == 2
    assert "data.chat_template is not set" in capsys.readouterr().err
    assert main(["evaluate", str(bare), "--data", str(file), "--data.chat_template", "chatml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["samples"] == 1


def test_what_the_files_leave_open_is_said_to_evaluate_and_predict(checkpoint: Path, tmp_path: Path) -> None:
    """A model without its configuration and tokenizer, which lie elsewhere, measured as the whole one is."""
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 20)
    bare, beside = tmp_path / "bare", tmp_path / "beside"
    bare.mkdir()
    shutil.copytree(checkpoint, beside)
    (beside / "model.safetensors").rename(bare / "model.safetensors")
    told = ["--model-config", str(beside / "config.json"), "--tokenizer", str(beside)]
    assert main(["evaluate", str(bare), "--data", str(text)]) == 2
    given = Given(config=str(beside / "config.json"), tokenizer=str(beside))
    assert evaluate(bare, [str(text)], given=given) == evaluate(checkpoint, [str(text)])
    assert main(["evaluate", str(bare), "--data", str(text), *told]) == 0
    (tmp_path / "prompts.txt").write_text("the quick\n")
    answers = []
    for folder, words in ((bare, told), (checkpoint, [])):
        out = tmp_path / f"{folder.name}.out"
        assert main(["predict", str(folder), "--prompts", str(tmp_path / "prompts.txt"), "--out", str(out), *words]) == 0
        answers.append(out.read_text())
    assert answers[0] == answers[1]
