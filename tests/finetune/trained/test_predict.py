"""``predict`` and the last words of ``evaluate``, on a trained run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from checkpoint import open_checkpoint
from finetune.cli import main
from tests.finetune.conftest import TrainedRun

pytestmark = pytest.mark.slow

PROMPTS = ["def get_path(", "    return self.", "    total = value + 3\n"]


def reference(folder: Path, prompt: str, tokens: int) -> str:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    with torch.no_grad():
        made = model.generate(ids, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    return str(tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True))


def test_a_batch_of_prompts_is_completed_as_one_by_one(
    trained: TrainedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    assert main(["predict", str(trained.output), "--prompts", str(file), "--max-new-tokens", "6", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    with open_checkpoint(trained.output / "checkpoints") as checkpoint:
        folder = checkpoint.path
    assert [row["prompt"] for row in rows] == PROMPTS
    assert [row["completion"] for row in rows] == [reference(folder, prompt, 6) for prompt in PROMPTS]


def test_lines_go_to_a_file_and_sampling_repeats_with_its_seed(trained: TrainedRun, tmp_path: Path) -> None:
    file, outs = tmp_path / "prompts.txt", [tmp_path / "a", tmp_path / "b", tmp_path / "c"]
    file.write_text("def\n\n    return self\n")
    for out, seed in zip(outs, ("1", "1", "2"), strict=True):
        words = [
            "predict",
            str(trained.output),
            "--prompts",
            str(file),
            "--out",
            str(out),
            "--temperature",
            "1",
            "--seed",
            seed,
        ]
        assert main([*words, "--max-new-tokens", "20"]) == 0
    first, second, third = (out.read_text() for out in outs)
    assert first == second != third
    assert first.count(">>> ") == 2


def test_chats_are_rendered_by_the_template(trained: TrainedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import shutil

    with open_checkpoint(trained.output / "checkpoints") as checkpoint:
        source = checkpoint.path
    chatty = tmp_path / "chatty"
    chatty.mkdir()
    for path in source.iterdir():
        if path.name != "manifest.json":
            shutil.copy(path, chatty)
    (chatty / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": PROMPTS[0]}]}) + "\n")
    words = ["--prompts", str(file), "--max-new-tokens", "5", "--json"]
    assert main(["predict", str(chatty), *words]) == 0
    assert json.loads(capsys.readouterr().out)["completion"] == reference(source, PROMPTS[0], 5)
    assert main(["predict", str(trained.output), *words]) == 2
    assert f"{file}, line 1: the chat template" in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"prompt": "a"}\n{"prompt": 3}\n', "line 2: prompt is a int; it must be text"),
        ('{"prompt": "a"}\nno\n', "line 2: not valid JSON"),
        ('{"question": "a"}\n', "line 1: has none of them; it must be an object with one of the keys"),
        ('{"messages": [{"role": "user"}]}\n', "line 1: every message must be an object with the texts role and content"),
        ("\n", "holds no prompt"),
    ],
)
def test_bad_prompts_are_refused_by_line(
    tmp_path: Path, trained: TrainedRun, text: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    assert main(["predict", str(trained.output), "--prompts", str(file)]) == 2
    assert says in " ".join(capsys.readouterr().err.split())


def test_usage_of_predict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "nowhere", "--prompts", "nowhere"]) == 2
    assert main(["predict", "nowhere", "--prompts", "x", "--temperature", "-1"]) == 2
    assert "--temperature" in capsys.readouterr().err


def test_last_words_are_counted_as_greedy_prediction_gives_them(
    trained: TrainedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_checkpoint(trained.output / "checkpoints") as checkpoint:
        folder = checkpoint.path
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    lines = [f"def get_{a} and {b}" for a in ("path", "value") for b in ("path", "total", "count", "items")]
    # One line whose last word is made by the model itself, if that can be read back.
    made = reference(folder, "def get_path", 1)
    lines.append(f"def get_path{made}" if made.startswith(" ") and made.strip() else "def get_path zz")
    expected = 0
    for line in lines:
        at = line.rindex(" ")
        wanted = tokenizer(line[at:], add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            got = reference(folder, line[:at], len(wanted))
        expected += tokenizer(got, add_special_tokens=False)["input_ids"] == wanted
    text = tmp_path / "lines.txt"
    text.write_text("\n".join([*lines, "oneword", ""]))
    assert main(["evaluate", str(trained.output), "--data", str(text), "--last-word", "line", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["last_words"] == len(lines)
    assert result["last_word_accuracy"] == pytest.approx(expected / len(lines))
    assert main(["evaluate", str(trained.output), "--data", str(text), "--last-word", "document", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["last_words"] == 1
