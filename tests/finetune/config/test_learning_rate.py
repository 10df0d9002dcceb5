"""The learning rate that nobody gave: by the kind of run, or that of the state a run goes on from."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from finetune.cli import main
from finetune.config.learning_rate import with_rate
from finetune.config.load import load_config
from finetune.train.resume import ResumeState
from finetune.train.schedule import make_schedule
from tests.finetune.support import small_run, write_config

NEW = {"new": {"model_type": "gpt_neox"}, "path": None}
EXISTING = {"path": "somewhere", "new": None}


def config_file(folder: Path, **sections: Any) -> Path:
    return write_config(small_run(folder, folder / "run", **sections), folder / "run.yaml")


@pytest.mark.parametrize(
    ("sections", "rate", "kind"),
    [
        ({"model": NEW}, 3e-4, "a new model"),
        ({"model": EXISTING}, 2e-5, "an existing model trained in full"),
        ({"model": EXISTING, "lora": {}}, 2e-4, "adapters"),
    ],
)
def test_the_default_follows_the_kind_of_run(
    tmp_path: Path, sections: dict[str, Any], rate: float, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = config_file(tmp_path, **sections, optimizer={"lr": None})
    config, words = with_rate(load_config(file))
    assert make_schedule(config, 10).peak == rate
    assert f"learning rate {rate:g}, usual for {kind}" in words
    assert main(["tune", str(file), "--print-config"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["optimizer"]["lr"] == rate
    given, words = with_rate(load_config(file, [("optimizer.lr", "1e-3")]), kept=5e-3)
    assert (given.optimizer.lr, words) == (1e-3, "learning rate 0.001"), "what is given wins over everything"


@pytest.mark.parametrize(
    ("recorded", "rate"), [({"course": {"optimizer.lr": 5e-3}}, 5e-3), ({}, 3e-4)], ids=["recorded", "as written before"]
)
def test_a_resumed_run_keeps_the_learning_rate_it_had(tmp_path: Path, recorded: dict[str, Any], rate: float) -> None:
    progress = {"step": 6, "samples": 24, "tokens": 100, "optimizer_steps": 6, "skipped_in_a_row": 0}
    manifest = SimpleNamespace(extra={"progress": progress, "settings": {}, **recorded})
    state = ResumeState(SimpleNamespace(manifest=manifest, path=tmp_path))  # type: ignore[arg-type]
    config, words = with_rate(load_config(config_file(tmp_path, model=EXISTING, optimizer={"lr": None})), state.learning_rate)
    assert config.optimizer.lr == rate
    assert words == f"learning rate {rate:g} as before"
