"""From conversations to a checkpoint that answers in their format: prepared once, packed, resumed exactly."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint import open_checkpoint
from tests.finetune.support import run_command, small_run, write_config

pytestmark = pytest.mark.slow

TEMPLATE = """\
{%- for message in messages -%}{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"""


def write_tokenizer(folder: Path) -> Path:
    """A tokenizer whose end of a turn is not its end of text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    description = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(description))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def losses_of(output: Path) -> dict[int, float]:
    entries: list[dict[str, Any]] = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    return {entry["step"]: entry["loss"] for entry in entries if "loss" in entry}


def test_conversations_are_trained_on_as_packed_and_resumed_bit_by_bit(tmp_path: Path) -> None:
    with (tmp_path / "chats.jsonl").open("w") as out:
        for number in range(60):
            turns = [("user", f"How much is {number}?"), ("assistant", "Very much. " * (number % 5 + 1))]
            out.write(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}) + "\n")
    tree = small_run(
        tmp_path,
        tmp_path / "run",
        data={"train": str(tmp_path / "chats.jsonl"), "eval": str(tmp_path / "chats.jsonl"), "seq_len": 128},
    )
    tree["eval"] = {"every": 0, "samples": 0}
    tree["tokenizer"] = {"path": str(write_tokenizer(tmp_path / "tokenizer"))}
    config = write_config(tree, tmp_path / "run.yaml")
    first = run_command("prepare", config, "--workers", "1")
    assert first.returncode == 0, first.stderr
    done = run_command("tune", config)
    assert done.returncode == 0, done.stderr
    assert "tokenising" in first.stdout
    assert "tokenising" not in done.stdout, "prepare has done it"
    assert "tokens packed, each sample by itself" in done.stdout
    assert losses_of(tmp_path / "run")[12] < losses_of(tmp_path / "run")[1]

    scored = run_command("evaluate", tmp_path / "run", "--data", tmp_path / "chats.jsonl", "--json")
    assert scored.returncode == 0, scored.stderr
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    (measured,) = [entry["eval_loss"] for entry in log if "eval_loss" in entry]
    assert json.loads(scored.stdout)["loss"] == pytest.approx(measured, rel=1e-5), "as the run itself measured"

    output = tmp_path / "again"
    shutil.copytree(tmp_path / "run", output)
    for root in ("checkpoints", "resume"):
        shutil.rmtree(output / root / "step-00000012")
        (output / root / "latest").write_text("step-00000006\n")
    resumed = run_command("tune", config, "--resume", "--run.output", output)
    assert resumed.returncode == 0, resumed.stderr
    assert losses_of(output) == losses_of(tmp_path / "run")
    with open_checkpoint(output / "resume") as ours, open_checkpoint(tmp_path / "run" / "resume") as whole:
        assert [name for name in whole.tensors if not torch.equal(ours.read(name), whole.read(name))] == []
    refused = run_command("tune", config, "--resume", "--data.too_long", "drop")
    assert refused.returncode == 2
    assert "run.resume" in refused.stderr

    folder = tmp_path / "run" / "checkpoints" / "step-00000012"
    assert (folder / "chat_template.jinja").read_text() == TEMPLATE
    with open_checkpoint(folder) as checkpoint:
        end, stop = 256, 259
        assert checkpoint.generation_config["eos_token_id"] == [end, stop], "generation ends where a turn ends"
