"""``tessera-finetune tune`` from end to end: what it shows, leaves behind, resumes, refuses and survives."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from checkpoint import CheckpointWriter, open_checkpoint
from tests.finetune.conftest import TrainedRun
from tests.finetune.support import run_command, small_run, start_command, write_config


def log_of(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]


def losses_of(output: Path) -> dict[int, float]:
    return {entry["step"]: entry["loss"] for entry in log_of(output) if "loss" in entry}


def test_the_run_is_shown_and_recorded(trained: TrainedRun) -> None:
    assert "gpt_neox" in trained.stdout
    assert "ZeRO-3 with optimizer on cpu and parameters on cpu; 2 ranks" in trained.stdout
    assert "step 12/12" in trained.stdout
    assert "tessera-serve --model" in trained.stdout
    assert "DeepSpeed]" not in trained.stdout, "DeepSpeed's own log belongs to the log files"
    assert sorted(losses_of(trained.output)) == list(range(1, 13))
    entry = next(entry for entry in log_of(trained.output) if "loss" in entry)
    assert {"step", "loss", "lr", "grad_norm", "tokens_per_second", "tokens"} <= set(entry)
    assert [entry["step"] for entry in log_of(trained.output) if "eval_loss" in entry] == [6, 12]
    assert losses_of(trained.output)[12] < losses_of(trained.output)[1]
    assert (trained.output / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list((trained.output / "tensorboard").glob("events.*"))
    assert "deprecated" not in (trained.output / "logs" / "rank-1.log").read_text()


def test_both_saves_are_whole(trained: TrainedRun) -> None:
    for root in ("checkpoints", "resume"):
        assert sorted(path.name for path in (trained.output / root).iterdir()) == ["latest", "step-00000006", "step-00000012"]
        with open_checkpoint(trained.output / root, verify="sha256") as checkpoint:
            assert checkpoint.step == 12


def test_the_checkpoint_opens_in_transformers_with_equal_logits(trained: TrainedRun) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from finetune.model.build import load_model

    folder = trained.output / "checkpoints" / "step-00000012"
    theirs, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("def get_path(value):", return_tensors="pt").input_ids
    with open_checkpoint(folder) as checkpoint, torch.no_grad():
        ours = load_model(checkpoint, torch.float32)
        assert torch.equal(ours(input_ids=ids).logits, theirs.eval()(input_ids=ids).logits)
        assert checkpoint.tokenizer_vocab_size == theirs.config.vocab_size
    assert theirs.generation_config.eos_token_id == tokenizer.eos_token_id
    assert theirs.config.use_cache is True


def test_resuming_gives_the_uninterrupted_run_bit_by_bit(trained: TrainedRun, tmp_path: Path) -> None:
    output = tmp_path / "run"
    shutil.copytree(trained.output, output)
    for root in ("checkpoints", "resume"):  # as if killed after the save of step 6, with step 12 under way
        shutil.rmtree(output / root / "step-00000012")
        (output / root / "latest").write_text("step-00000006\n")
    # The state knows the learning rate too.
    done = run_command("tune", trained.config, "--resume", "--run.output", output, "--optimizer.lr", "null")
    assert done.returncode == 0, done.stderr
    assert "resumed at step 6" in done.stdout
    assert "learning rate 0.005 as before" in done.stdout
    assert losses_of(output) == losses_of(trained.output)
    for root in ("checkpoints", "resume"):
        with open_checkpoint(output / root) as ours, open_checkpoint(trained.output / root) as whole:
            assert ours.step == whole.step == 12
            assert set(ours.tensors) == set(whole.tensors)
            assert [name for name in whole.tensors if not torch.equal(ours.read(name), whole.read(name))] == []


def test_a_finished_run_has_nothing_to_resume_and_another_model_is_refused(trained: TrainedRun, tmp_path: Path) -> None:
    done = run_command("tune", trained.config, "--resume")
    assert done.returncode == 0, done.stderr
    assert "nothing to do" in done.stdout
    other = run_command("tune", trained.config, "--resume", "--model.new.hidden_size", "48")
    assert other.returncode == 2
    assert "run.resume" in other.stderr
    assert "hidden_size" in other.stderr
    again = run_command("tune", trained.config)
    assert again.returncode == 2
    assert "--resume" in again.stderr


def test_an_existing_model_is_trained_on_in_bf16(trained: TrainedRun, tmp_path: Path) -> None:
    tree = small_run(trained.text, tmp_path / "run", zero={"stage": 1}, save={"dtype": "float32"})
    tree["schedule"] = {"steps": 3, "warmup": 1}
    tree["model"] = {"path": str(trained.output / "checkpoints")}
    del tree["tokenizer"]
    tree["run"]["precision"] = "bf16"
    del tree["optimizer"]
    done = run_command("tune", write_config(tree, tmp_path / "run.yaml"))
    assert done.returncode == 0, done.stderr
    assert "learning rate 2e-05, usual for an existing model trained in full" in done.stdout
    assert max(entry["lr"] for entry in log_of(tmp_path / "run") if "lr" in entry) == 2e-5
    losses = losses_of(tmp_path / "run")
    assert losses[1] < losses_of(trained.output)[1] - 0.3, "it must start where the first run ended"
    with open_checkpoint(tmp_path / "run" / "checkpoints") as checkpoint:
        assert {info.dtype for info in checkpoint.tensors.values()} == {torch.float32}
        assert checkpoint.config["dtype"] == "float32"
        rounded = [
            name for name in checkpoint.tensors if torch.equal(checkpoint.read(name), checkpoint.read(name).bfloat16().float())
        ]
    assert len(rounded) < 5, "float32 must be the optimizer's weights, not rounded ones"


def test_three_steps_that_are_not_finite_end_the_run_and_name_the_last_good_save(trained: TrainedRun, tmp_path: Path) -> None:
    poisoned = tmp_path / "poisoned"
    folder = trained.output / "checkpoints" / "step-00000012"
    with open_checkpoint(folder) as checkpoint:
        files = [folder / "tokenizer.json", folder / "tokenizer_config.json"]
        with CheckpointWriter(poisoned, step=0, config=checkpoint.config, tokenizer_files=files) as writer:
            for name in checkpoint.tensors:
                tensor = checkpoint.read(name)
                # Finite numbers, of which two in a row overflow: what is not finite is refused when it is loaded.
                writer.add(name, tensor * 1e30 if ".mlp.dense" in name and name.endswith("weight") else tensor)
    tree = small_run(trained.text, tmp_path / "run", zero={"stage": 2})
    tree["model"] = {"path": str(poisoned)}
    del tree["tokenizer"]
    done = run_command("tune", write_config(tree, tmp_path / "run.yaml"))
    assert done.returncode == 1
    assert "not a finite number 3 steps in a row" in done.stderr
    assert "last good checkpoint: none" in done.stderr
    assert [entry.get("skipped") for entry in log_of(tmp_path / "run")] == ["loss"] * 3
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_snapshots_hold_the_weights_alone_and_are_all_kept(text_folder: Path, tmp_path: Path) -> None:
    sections = {"save": {"every": 2, "keep": 1, "snapshot_every": 2}, "schedule": {"steps": 4, "warmup": 1}}
    done = run_command("tune", write_config(small_run(text_folder, tmp_path / "run", **sections), tmp_path / "run.yaml"))
    assert done.returncode == 0, done.stderr
    names = {root: sorted(path.name for path in (tmp_path / "run" / root).iterdir()) for root in ("checkpoints", "snapshots")}
    assert names == {"checkpoints": ["latest", "step-00000004"], "snapshots": ["latest", "step-00000002", "step-00000004"]}
    run = tmp_path / "run"
    with open_checkpoint(run / "snapshots", verify="sha256") as ours, open_checkpoint(run / "checkpoints") as saved:
        assert all(torch.equal(ours.read(name), saved.read(name)) for name in saved.tensors)


def test_without_a_compiler_training_goes_on_with_the_torch_optimizer(text_folder: Path, tmp_path: Path) -> None:
    empty = tmp_path / "bin"
    empty.mkdir()
    tree = small_run(text_folder, tmp_path / "run", zero={"stage": 2}, offload={"optimizer": "cpu"}, schedule={"steps": 3})
    tree["run"]["ranks"] = 2
    hidden = {"PATH": str(empty), "XDG_CACHE_HOME": str(tmp_path / "cache"), "CXX": "no-such-compiler"}
    done = run_command("tune", write_config(tree, tmp_path / "run.yaml"), env=hidden)
    assert done.returncode == 0, done.stderr
    assert "no C++ compiler" in done.stdout
    assert "torch's AdamW" in done.stdout
    assert sorted(losses_of(tmp_path / "run")) == [1, 2, 3]


def test_a_model_that_cannot_be_is_refused_before_training(text_folder: Path, tmp_path: Path) -> None:
    config = write_config(small_run(text_folder, tmp_path / "run"), tmp_path / "run.yaml")
    done = run_command("tune", config, "--model.new.hiden_size", "64")
    assert done.returncode == 2, done.stderr
    assert "model.new.hiden_size: unknown key" in done.stderr
    assert "hidden_size" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_bad_line_of_data_is_refused_by_file_and_line(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "fine"}\n{"text": "fine too"}\n{"text": broken}\n')
    tree = small_run(tmp_path, tmp_path / "run", data={"train": str(data)})
    done = run_command("tune", write_config(tree, tmp_path / "run.yaml"))
    assert done.returncode == 2
    assert f"{data}, line 3" in done.stderr
    assert "Traceback" not in done.stderr


# -- ends that nobody planned


def endless(text: Path, folder: Path) -> Path:
    tree = small_run(text, folder / "run", schedule={"steps": 1_000_000}, save={"every": 0})
    tree["run"]["ranks"] = 2
    return write_config(tree, folder / "run.yaml")


BEGIN_SECONDS = 400
"""For a run to come to its first steps: three processes import torch for it, beside all else that a machine does."""


def until_training(process: subprocess.Popen[str], output: Path) -> dict[int, psutil.Process]:
    """Wait for the first steps; return the rank processes by rank."""
    deadline = time.monotonic() + BEGIN_SECONDS
    log = output / "log.jsonl"
    while not (log.exists() and log.read_text().count("\n") >= 2):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "training did not begin"
        time.sleep(0.05)
    ranks = (child for child in psutil.Process(process.pid).children() if "finetune.launch.rank" in child.cmdline())
    return {int(rank.environ()["RANK"]): rank for rank in ranks}


def all_gone(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=400)[1]


def test_a_killed_rank_ends_the_run_with_the_cause(text_folder: Path, tmp_path: Path) -> None:
    with start_command(["tune", endless(text_folder, tmp_path)]) as process:
        ranks = until_training(process, tmp_path / "run")
        ranks[1].kill()
        _, errors = process.communicate(timeout=600)
        assert process.returncode == 1
        assert "rank 1 was killed (SIGKILL)" in errors
        assert all_gone(list(ranks.values()))


def test_an_aborted_rank_ends_the_run_with_its_last_words(text_folder: Path, tmp_path: Path) -> None:
    with start_command(["tune", endless(text_folder, tmp_path)]) as process:
        ranks = until_training(process, tmp_path / "run")
        with (tmp_path / "run" / "logs" / "rank-1.log").open("a") as log:
            log.write("terminate called\n  what(): a reason\n")
        ranks[1].send_signal(signal.SIGABRT)
        _, errors = process.communicate(timeout=600)
        assert process.returncode == 1
        assert "rank 1 was ended by SIGABRT: " in errors
        assert "terminate called /   what(): a reason; its log: " in errors
        assert all_gone(list(ranks.values()))


def test_sigterm_saves_on_all_ranks_and_the_run_can_go_on(text_folder: Path, tmp_path: Path) -> None:
    with start_command(["tune", endless(text_folder, tmp_path)]) as process:
        ranks = until_training(process, tmp_path / "run")
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors
        assert "stopped after step" in output
        assert all_gone(list(ranks.values()))
    with open_checkpoint(tmp_path / "run" / "resume", verify="sha256") as state:
        last = max(losses_of(tmp_path / "run"))
        assert state.step == last


def test_ranks_die_with_the_command(text_folder: Path, tmp_path: Path) -> None:
    with start_command(["tune", endless(text_folder, tmp_path)]) as process:
        ranks = until_training(process, tmp_path / "run")
        os.kill(process.pid, signal.SIGKILL)
        process.wait(timeout=400)
        assert all_gone(list(ranks.values()))
