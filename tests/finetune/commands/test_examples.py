"""The YAML that people start from is read as they will read it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from finetune.config.load import load_config
from serve.client import Client
from tests.finetune.support import NEEDS_LIBAIO, ROOT, run_command, write_config
from tests.finetune.train.test_tune import losses_of
from tests.support import reference
from tests.support.server import serving

EXAMPLES = sorted((ROOT / "examples").rglob("*.yaml"))
TRAINING = [path for path in EXAMPLES if "\ndata:" in path.read_text()]


@pytest.mark.parametrize("path", TRAINING, ids=lambda path: path.name)
def test_an_example_is_a_configuration(path: Path) -> None:
    command = "pretrain" if "pretrain" in path.name else "tune"
    assert load_config(path, command=command).run.output.startswith("runs/")


def test_the_guide_shows_real_configurations_and_names_real_examples(tmp_path: Path) -> None:
    pages = [ROOT / "docs" / "training.md", *sorted((ROOT / "docs" / "training").glob("*.md"))]
    guide = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    first, *others = (yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", guide, flags=re.DOTALL))
    assert load_config(write_config(first, tmp_path / "run.yaml")).run.ranks == 2
    for other in others:  # parts of a run, laid over the first
        load_config(write_config({**first, **other}, tmp_path / "part.yaml"))
    for example in re.findall(r"`([a-z0-9/-]+\.yaml)`", guide):
        assert (ROOT / "examples" / example).is_file()


@pytest.mark.slow
def test_a_chat_model_is_trained_given_adapters_merged_and_pretrained(tmp_path: Path, text_folder: Path) -> None:
    """The small examples as they lie, one after the other; only where they write differs."""
    chat, lora, pretrained = (tmp_path / name for name in ("chat", "lora", "pretrained"))
    run = {name: ROOT / "examples" / "cpu" / f"{name}.yaml" for name in ("chat-offload", "lora", "pretrain")}
    done = run_command("tune", run["chat-offload"], "--run.output", chat)
    assert done.returncode == 0, done.stderr
    assert (chat / "checkpoints" / "step-00000060" / "chat_template.jinja").is_file()
    losses = losses_of(chat)
    assert losses[60] < 0.3 * losses[10], "sixteen answers are learned by heart"
    with serving(chat / "checkpoints", "--tensor-parallel-size", "2") as server, Client(server.address) as client:
        asked = {"What is LoRA?": "Small adapters beside frozen weights.", "Who watches at night?": "Prometheus does."}
        for question, known in asked.items():
            answer = client.generate([{"role": "user", "content": question}], max_new_tokens=40)
            assert answer.text.strip() == known, "it answers in the format it was trained on"
            assert answer.completions[0].finish.reason == "eos", "it learned where an answer ends"
    done = run_command("tune", run["lora"], "--run.output", lora, "--model.path", chat / "checkpoints")
    assert done.returncode == 0, done.stderr
    done = run_command("merge", lora, tmp_path / "merged")
    assert done.returncode == 0, done.stderr
    words = [
        "--data.train",
        text_folder,
        "--schedule.steps",
        "4",
        "--data.seq_len",
        "32",
        "--tokenizer.train.vocab_size",
        "300",
    ]
    done = run_command("pretrain", run["pretrain"], "--run.output", pretrained, *words)
    assert done.returncode == 0, done.stderr
    prompt = [5, 6, 7, 8]
    with serving(pretrained / "checkpoints", "--tensor-parallel-size", "2") as server, Client(server.address) as client:
        answer = client.generate(prompt, max_new_tokens=16, ignore_eos=True)
    expected = reference.greedy(reference.load(pretrained / "checkpoints" / "step-00000004"), prompt, 16)
    assert list(answer.completions[0].token_ids) == expected, "stages leave a plain checkpoint"


@pytest.mark.slow
@NEEDS_LIBAIO
def test_the_small_example_with_a_disk_trains(tmp_path: Path) -> None:
    words = ["--run.output", tmp_path / "run", "--offload.path", tmp_path / "disk"]
    done = run_command("tune", ROOT / "examples" / "cpu" / "chat-nvme.yaml", *words)
    assert done.returncode == 0, done.stderr
    assert "on nvme" in done.stdout
    assert [file.name for file in (tmp_path / "disk").iterdir()] == ["tessera-disk.json"], "its swap files are gone with it"
