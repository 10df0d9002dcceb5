"""``tessera-finetune plan``: a forecast of any machine, and what to change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from finetune.cli import main
from tests.finetune.support import small_run, write_config


def planned(tmp_path: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    tree = small_run(tmp_path, tmp_path / "run")
    tree["model"]["new"] |= {"hidden_size": 2048, "num_attention_heads": 16, "intermediate_size": 8192, "num_hidden_layers": 8}
    tree["batch"] = {"micro": 8}
    tree["run"]["device"] = "auto"
    code = main(["plan", str(write_config(tree, tmp_path / "run.yaml")), *words])
    return code, capsys.readouterr().out


def test_plan_needs_neither_data_nor_hardware(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = planned(tmp_path, capsys, "--gpus", "1", "--gpu-gib", "80", "--ram-gib", "256", "--disk-gib", "500")
    assert code == 0
    for words in ("fits", "ZeRO-3", "moments", "not calibrated", "device memory of one rank"):
        assert words in said


def test_plan_compares_a_described_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = ("--gpus", "1", "--gpu-gib", "80", "--ram-gib", "256", "--json")
    for room, shortages in (("500", 0), ("0.5", 1)):
        code, said = planned(tmp_path, capsys, *machine, "--disk-gib", room)
        answer = json.loads(said)
        assert (code, len(answer["shortages"])) == (2 if shortages else 0, shortages)
        assert all("disk space" in shortage for shortage in answer["shortages"])


def test_plan_says_what_to_change_and_that_is_true(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    room = ("--gpus", "1", "--gpu-gib", "5", "--ram-gib", "64", "--disk-gib", "500")
    code, said = planned(tmp_path, capsys, *room, "--json")
    assert code == 2
    answer = json.loads(said)
    assert answer["shortages"]
    assert answer["advice"], "there is room on the host"
    for change in answer["advice"]:
        words = [word for key, value in change.items() for word in (f"--{key}", str(value))]
        assert planned(tmp_path, capsys, *room, *words)[0] == 0
    code, said = planned(tmp_path, capsys, *room)
    assert code == 2
    assert "does not fit" in said
    assert "offload: {optimizer: cpu" in said


def test_plan_offers_the_plain_method_where_zenflow_is_too_large(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    zenflow = ("--zero.stage=2", "--offload.optimizer=cpu", "--offload.method=zenflow")
    machine = ("--gpus", "1", "--gpu-gib", "80", "--nvme-gib", "500", "--disk-gib", "500", "--json")
    for ram, key, value in (("11", "offload.method", "plain"), ("8", "offload.optimizer", "nvme")):
        room = (*machine, "--ram-gib", ram)
        code, said = planned(tmp_path, capsys, *zenflow, "--offload.zenflow.share=0.2", *room)
        assert code == 2
        (change, *_) = (change for change in json.loads(said)["advice"] if change.get(key) == value)
        assert change["offload.method"] == "plain"
        words = [f"--{key}={value}" for key, value in change.items()]
        assert planned(tmp_path, capsys, *zenflow, *words, *room)[0] == 0


def test_plan_knows_the_command_of_a_run_with_one_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--zero.stage=1", "--run.precision=bf16", "--gpus=0", "--json")
    needs = {}
    for command in ("tune", "pretrain"):
        code, said = planned(tmp_path, capsys, *words, "--command", command)
        assert code in (0, 2)
        needs[command] = json.loads(said)["layout"]["staged"]
    assert needs == {"tune": False, "pretrain": True}


def test_plan_refuses_bad_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--gpus", "2"], ["--ram-gib", "0"], ["--gpus", "-1", "--gpu-gib", "1"]):
        assert main(["plan", str(tmp_path / "x.yaml"), *words]) == 2
        assert words[0] in capsys.readouterr().err


def test_a_model_that_cannot_be_followed_is_told_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch cannot follow experts in fp32."""

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("Expected inputs of\nBF16 type")

    monkeypatch.setattr("finetune.forecast.estimate.forecast", fails)
    assert main(["plan", str(write_config(small_run(tmp_path, tmp_path / "run"), tmp_path / "run.yaml"))]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "no forecast can be made of this gpt_neox, which is trained all the same: Expected inputs of BF16 type" in said
