"""A run's folder belongs to one run and one process; old saves go, whole ones stay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from checkpoint import hold
from finetune.config import DataConfig, ModelConfig, RunConfig, TokenizerConfig, TuneConfig
from finetune.errors import ConfigError
from finetune.output.folder import checkpoint_folder, claimed_output, prune, step_folders


def config(output: Path, resume: str = "never") -> TuneConfig:
    return TuneConfig(
        run=RunConfig(output=str(output), resume=resume),  # type: ignore[arg-type]
        data=DataConfig(train=("text",)),
        model=ModelConfig(new={"model_type": "gpt_neox"}),
        tokenizer=TokenizerConfig(path="somewhere"),
    )


def save(output: Path, *names: str) -> None:
    for name in names:
        (output / name).mkdir(parents=True)


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with claimed_output(config(tmp_path)) as output:
        assert output == tmp_path
        with pytest.raises(ConfigError, match="another process is training"), claimed_output(config(tmp_path)):
            pass
    with claimed_output(config(tmp_path)):
        pass


def test_a_run_is_not_overwritten(tmp_path: Path) -> None:
    save(tmp_path, "checkpoints/step-00000005", "resume/step-00000005")
    with pytest.raises(ConfigError, match="--resume"), claimed_output(config(tmp_path)):
        pass
    with claimed_output(config(tmp_path, "auto")):
        pass


def test_a_run_without_resume_state_does_not_start_over(tmp_path: Path) -> None:
    save(tmp_path, "checkpoints/step-00000005")
    with pytest.raises(ConfigError, match="no resume state"), claimed_output(config(tmp_path, "auto")):
        pass


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    broken = claimed_output(config(tmp_path / "file" / "run"))
    with pytest.raises(ConfigError, match=r"run\.output: .*file/run cannot be written"), broken:
        pass


def test_the_newest_saves_are_kept(tmp_path: Path) -> None:
    save(tmp_path, "step-00000005", "step-00000010", "step-100000000", "step-00000020.tmp-x", "other")
    prune(tmp_path / "step-100000000", 2)
    assert [step for step, _ in step_folders(tmp_path)] == [10, 100_000_000]
    assert (tmp_path / "other").is_dir()
    prune(tmp_path / "step-00000010", 0)
    assert len(step_folders(tmp_path)) == 2
    assert step_folders(tmp_path / "nowhere") == []


def test_a_save_that_is_served_stays_until_the_server_is_gone(tmp_path: Path) -> None:
    save(tmp_path, *(f"step-{step:08d}" for step in (2, 4, 6, 8)))
    served, newest = tmp_path / "step-00000002", tmp_path / "step-00000006"
    holds = [hold(served), hold(served), hold(tmp_path / "step-00000008")]
    assert prune(newest, 1) == [served, tmp_path / "step-00000008"], "also one of a course that the run has left"
    assert [step for step, _ in step_folders(tmp_path)] == [2, 6, 8]
    holds.pop(0)
    assert served in prune(newest, 1), "another server holds it"
    holds.clear()
    assert prune(newest, 1) == []
    assert [step for step, _ in step_folders(tmp_path)] == [6]


def test_checkpoints_of_a_run_are_found_from_its_folder(tmp_path: Path) -> None:
    assert checkpoint_folder(tmp_path) == tmp_path
    save(tmp_path, "checkpoints")
    assert checkpoint_folder(tmp_path) == tmp_path / "checkpoints"


@pytest.mark.parametrize(("held", "key"), [("config.json", "model_type"), ("adapter_config.json", "peft_type")])
def test_a_new_run_does_not_begin_in_the_folder_of_a_model(held: str, key: str, tmp_path: Path) -> None:
    """Which readers would take for the run's."""
    (tmp_path / held).write_text('{"run": {}}')
    with claimed_output(config(tmp_path)):
        pass
    (tmp_path / held).write_text(f'{{"{key}": "x"}}')
    with pytest.raises(ConfigError, match=rf"run\.output: .* holds a model \({held}\)"), claimed_output(config(tmp_path)):
        pass
    (tmp_path / "checkpoints" / "step-00000002").mkdir(parents=True)
    (tmp_path / "resume" / "step-00000002").mkdir(parents=True)
    with claimed_output(replace(config(tmp_path), run=replace(config(tmp_path).run, resume="auto"))):
        pass  # as earlier releases left it
