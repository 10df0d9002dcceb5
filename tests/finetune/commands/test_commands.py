"""``export`` and ``evaluate`` on a trained run, and what the command line answers to mistakes."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from checkpoint import open_checkpoint
from finetune.cli import main
from tests.finetune.conftest import TrainedRun
from tests.finetune.support import ROOT


def test_export_writes_a_plain_folder_in_another_dtype(trained: TrainedRun, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "exported"
    assert main(["export", str(trained.output), str(out), "--dtype", "bfloat16", "--max-shard-mib", "1"]) == 0
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(out).eos_token == "<|endoftext|>"
    with open_checkpoint(out, verify="sha256") as written, open_checkpoint(trained.output / "checkpoints") as source:
        assert written.step == 12
        for name in source.tensors:
            assert torch.equal(written.read(name), source.read(name).bfloat16())
    assert [path.name for path in tmp_path.iterdir()] == ["exported"], "nothing of the writing is left beside it"


def test_export_takes_a_given_step_and_exact_weights(trained: TrainedRun, tmp_path: Path) -> None:
    out = tmp_path / "exported"
    assert main(["export", str(trained.output), str(out), "--dtype", "float32", "--step", "6"]) == 0
    with open_checkpoint(out) as written, open_checkpoint(trained.output / "resume" / "step-00000006") as state:
        assert written.step == 6
        assert all(torch.equal(written.read(name), state.read(f"master.{name}")) for name in written.tensors)


@pytest.mark.parametrize("name", ["global_step{}", "iter_{:07d}", "step-{}", "checkpoint-{}"])
def test_export_takes_the_step_that_a_trainers_folder_is_named_by(trained: TrainedRun, tmp_path: Path, name: str) -> None:
    saves = {step: tmp_path / "saves" / name.format(step) for step in (6, 12)}
    for step, folder in saves.items():
        shutil.copytree(trained.output / "checkpoints" / f"step-{step:08d}", folder)
    assert main(["export", str(tmp_path / "saves"), str(tmp_path / "out"), "--step", "6"]) == 0
    with open_checkpoint(tmp_path / "out") as written:
        assert written.step == 6


def test_export_refuses_a_step_that_none_or_two_folders_are_named_by(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("global_step5", "step-20", "step-100"):
        (tmp_path / "saves" / name).mkdir(parents=True)
    words = ["export", str(tmp_path / "saves"), str(tmp_path / "out"), "--step"]
    assert main([*words, "7"]) == 2
    assert "has no checkpoint of step 7; there are 5, 20, 100" in capsys.readouterr().err
    (tmp_path / "saves" / "checkpoint" / "step-5").mkdir(parents=True)
    assert main([*words, "20"]) == 2
    assert "global_step5 and step-5 are both of step 5" in capsys.readouterr().err
    (tmp_path / "saves" / "checkpoint" / "step-5").rmdir()
    (tmp_path / "saves" / "step-9").symlink_to("/usr")
    assert main([*words, "9"]) == 2
    assert "leaves" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--step", "7"], "has no checkpoint of step 7; there are 6, 12"),
        (["--max-shard-mib", "0"], "at least 1"),
        (["--dtype", "int8"], "invalid choice"),
    ],
)
def test_export_refuses(
    trained: TrainedRun, tmp_path: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(trained.output), str(tmp_path / "out"), *words]) == 2
    assert says in capsys.readouterr().err


def test_export_overwrites_nothing_and_needs_a_checkpoint(
    trained: TrainedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(trained.output), str(trained.output)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["export", str(tmp_path), str(tmp_path / "out")]) == 2
    assert str(tmp_path) in capsys.readouterr().err.replace("\n", "")


def test_evaluate_scores_every_token_once(trained: TrainedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text = tmp_path / "a.txt"
    text.write_text("def get_path(value):\n    return self.items.total\n")
    assert main(["evaluate", str(trained.output), "--data", str(text), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    folder = trained.output / "checkpoints"
    with open_checkpoint(folder) as checkpoint:
        model = AutoModelForCausalLM.from_pretrained(checkpoint.path).eval()
        tokenizer = AutoTokenizer.from_pretrained(checkpoint.path)
    ids = torch.tensor([[*tokenizer(text.read_text())["input_ids"], tokenizer.eos_token_id]])
    window = model.config.max_position_embeddings
    total, count = 0.0, 0
    with torch.no_grad():
        for start in range(0, ids.shape[1] - 1, window):
            inputs, targets = ids[:, start : start + window], ids[0, start + 1 : start + window + 1]
            logits = model(inputs[:, : len(targets)]).logits[0]
            total += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
            count += len(targets)
    assert result["tokens"] == count == ids.shape[1] - 1
    assert result["loss"] == pytest.approx(total / count, abs=1e-5)
    assert result["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-4)
    assert result["bits_per_byte"] == pytest.approx(total / math.log(2) / len(text.read_bytes()), rel=1e-4)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "usage"),
        (["retrain", "x.yaml"], "unknown command 'retrain'; did you mean pretrain?"),
        (["--nonsense"], "required: COMMAND"),
        (["data"], "{check,show}"),
        (["data", "chek", "x.yaml"], "invalid choice: 'chek'"),
        (["data", "check", "x.yaml", "--row", "1"], "tessera-finetune data check: error: unrecognized arguments: --row 1"),
        (["prepare", "x.yaml", "--workers", "0"], "--workers is 0; it must be at least 1"),
        (["tune", "x.yaml", "--zero.stage"], "--zero.stage needs a value"),
        (["export", "x", "y", "--save.dtype", "float32"], "unrecognized arguments: --save.dtype float32"),
        (
            ["evaluate", "x", "--data", "y", "--zero.stage", "3"],
            "command line, --zero.stage: evaluate takes --data.KEY of format",
        ),
        (["tune"], "CONFIG.yaml"),
        (["tune", "no-such.yaml"], "no-such.yaml"),
        (["tune", "x.yaml", "--nonsense"], "--nonsense"),
        (["doctor", "now"], "now"),
        (["evaluate", "nowhere", "--data", "nowhere"], "nowhere"),
        (["evaluate", "nowhere", "--data", "x", "--batch", "0"], "--batch is 0; it must be at least 1"),
    ],
)
def test_usage_mistakes_exit_2_and_say_what(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert says in capsys.readouterr().err


def test_help_lists_commands_and_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "doctor" in capsys.readouterr().out
    assert main(["tune", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--offload.optimizer (none)" in shown
    assert "--schedule.warmup (0.05)" in shown


def test_every_command_says_what_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    commands = re.findall(r"^    ([a-z]+) ", capsys.readouterr().out, re.MULTILINE)
    assert len(commands) == 11
    for words in (*([command] for command in commands), ["data", "check"], ["data", "show"]):
        assert main([*words, "--help"]) == 0
        assert capsys.readouterr().out.startswith(f"usage: tessera-finetune {' '.join(words)} [-h]")


def test_the_list_of_commands_needs_nothing_of_any_of_them() -> None:
    program = "import sys; from finetune.cli import main; main(['--help']); sys.exit(bool({names} & set(sys.modules)))"
    names = "{'torch', 'numpy', 'transformers', 'msgspec', 'yaml', 'finetune.config'}"
    done = subprocess.run([sys.executable, "-c", program.format(names=names)], cwd=ROOT, capture_output=True, timeout=400)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", [["--hostfile", "hosts"], ["--hostfile=hosts"]])
def test_ranks_of_other_nodes_get_every_argument_but_the_hostfile(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class HandedOver(Exception):
        pass

    def hand_over(hostfile: Path, arguments: list[str]) -> None:
        raise HandedOver(hostfile, arguments)

    monkeypatch.setattr("finetune.launch.external.hand_over", hand_over)
    with pytest.raises(HandedOver) as handed:
        main(["pretrain", "--zero.stage", "0", *words, "run.yaml", "--run.seed=3", "--resume"])
    expected = ["pretrain", "--zero.stage", "0", "run.yaml", "--run.seed=3", "--resume"]
    assert handed.value.args == (Path("hosts"), expected)


def test_a_mistyped_key_is_told_with_the_nearest_one(trained: TrainedRun, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("tune", "pretrain", "plan", "prepare"):
        assert main([command, str(trained.config), "--zero.stge", "3"]) == 2
        assert "error: command line, --zero.stge: unknown key zero.stge; did you mean zero.stage?" in capsys.readouterr().err


def test_print_config_shows_all_of_it(trained: TrainedRun, capsys: pytest.CaptureFixture[str]) -> None:
    import yaml

    assert main(["tune", str(trained.config), "--zero.stage", "1", "--offload.parameters", "none", "--print-config"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["zero"]["stage"] == 1
    assert shown["optimizer"]["betas"] == [0.9, 0.95]


def test_a_foreign_checkpoint_is_exported_whole_and_cut_for_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file
    from transformers import GPT2Config, GPT2LMHeadModel

    settings = {"vocab_size": 11, "n_embd": 6, "n_head": 2, "n_layer": 1, "n_positions": 8}
    settings |= {"bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(**settings))
    tensors = {name: torch.randn_like(parameter) for name, parameter in model.named_parameters()}
    source = tmp_path / "source"
    partial = tmp_path / "partial"  # of which a layer's matrix was not saved, being frozen
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there are no ranks
        app = {f"app.{name}": tensor for name, tensor in tensors.items()}
        dcp.save(app, checkpoint_id=source, no_dist=True)
        dcp.save({name: tensor for name, tensor in app.items() if "c_fc" not in name}, checkpoint_id=partial, no_dist=True)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **settings}))
    for ranks in ("1", "2"):
        out = tmp_path / f"out{ranks}"
        words = ["export", "--from", str(source), "--to", str(out), "--tensor-parallel-size", ranks, "--dtype", "bfloat16"]
        assert main(words) == 0
        with open_checkpoint(out, verify="sha256") as checkpoint:
            assert set(checkpoint.tensors) == set(tensors)
            for name, tensor in tensors.items():
                assert torch.equal(checkpoint.read(name), tensor.bfloat16())
    assert set(load_file(tmp_path / "out1" / "model.safetensors")) == set(tensors)
    assert len(list((tmp_path / "out2").glob("shard-*.safetensors"))) == 2
    assert main(["export", "--from", str(source)]) == 2
    assert main(["export", str(partial), str(tmp_path / "out3")]) == 2
    assert "has no tensor 'transformer.h.0.mlp.c_fc.weight'" in capsys.readouterr().err
    assert not (tmp_path / "out3").exists()


def test_export_and_inspect_take_whatever_can_be_said_of_a_checkpoint() -> None:
    from dataclasses import fields

    from checkpoint import Given
    from finetune.commands.parser import CommandParser, add_given, given_of

    parser = CommandParser()
    add_given(parser)
    words = "--model-config a --tokenizer b --weights-prefix c --base d --adapter e --master-weights --layer-map f"
    said = parser.parse_args(
        [*words.split(), "--adapter-config", "g", "--neox-qkv-layout", "per-head", "--base-changed", "accept"]
    )
    given = given_of(said)
    assert given_of(parser.parse_args([])) == Given()
    assert all(getattr(given, field.name) != getattr(Given(), field.name) for field in fields(Given))
