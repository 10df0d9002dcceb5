"""A model that is far too large is refused by its sizes alone: at once, before any rank starts."""

from __future__ import annotations

import dataclasses
import json
import math
import resource
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from finetune.cli import main
from finetune.config import ModelConfig
from finetune.errors import ConfigError, FinetuneError
from finetune.forecast import least
from finetune.forecast.least import least_elements
from finetune.launch import external
from finetune.model.build import meta_shapes
from tests.finetune.forecast.support import config_of, hardware
from tests.finetune.support import run_command, small_run, write_config
from tests.support.models import FAMILIES, SMALL

SEVENTY = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


def config_file(folder: Path, text: Path, model: dict[str, Any], **sections: Any) -> Path:
    tree = small_run(text, folder / "run", **sections)
    tree["model"] = model
    return write_config(tree, folder / "run.yaml")


def test_seventy_billion_weights_are_refused_in_seconds_before_ranks_start(tmp_path: Path, text_folder: Path) -> None:
    config = config_file(tmp_path, text_folder, {"new": SEVENTY})
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run_command("tune", config)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 2
    assert "the run does not fit this machine: host memory: needs" in done.stderr
    assert "--anyway" in done.stderr
    assert not (tmp_path / "run").exists(), "no rank was started, and nothing is left of the run"
    # Seconds of the processor rather than of the clock: other tests run beside this one.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 5


@pytest.mark.parametrize("sections", [{}, {"lora": {}}, {"optimizer": {"name": "lion"}}], ids=["full", "adapters", "lion"])
def test_an_existing_model_is_refused_by_its_configuration(
    tmp_path: Path, text_folder: Path, sections: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({**SEVENTY, "num_hidden_layers": 8000}))
    config = config_file(tmp_path, text_folder, {"path": str(tmp_path / "model")}, **sections)
    assert main(["tune", str(config)]) == 2
    assert "billion weights" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()


def test_the_model_of_a_runs_folder_is_seen_too(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Path(__file__).parents[2] / "fixtures" / "release_0_1" / "tune"
    monkeypatch.setattr(least, "this_machine", lambda config: hardware(ram_bytes=1 << 10))
    for path in (run, run / "checkpoints"):
        config = dataclasses.replace(config_of(), model=ModelConfig(path=str(path)))
        with pytest.raises(ConfigError, match="billion weights"):
            least.check_least(config)


@pytest.mark.parametrize(("here", "refused"), [("2", True), ("1", False)])
def test_ranks_of_a_launcher_refuse_it_where_all_of_them_are_on_one_machine(
    tmp_path: Path, text_folder: Path, here: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": here}
    for name, value in {**environment, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    began = []

    def train(*_: Any, **__: Any) -> None:
        began.append(True)
        raise FinetuneError("enough")

    monkeypatch.setattr(external, "train", train)
    config = config_file(tmp_path, text_folder, {"new": {**SEVENTY, "num_hidden_layers": 8000}})
    assert main(["tune", str(config)]) != 0
    assert bool(began) is not refused


@pytest.mark.parametrize("family", FAMILIES)
def test_no_model_is_thought_larger_than_it_is(family: str) -> None:
    sizes = {"model_type": family, "vocab_size": 509, **SMALL[family]}
    whole = sum(math.prod(shape) for shape in meta_shapes(CONFIG_MAPPING[family](**{**sizes, "bos_token_id": 0})).values())
    assert 0.5 * whole < least_elements(sizes) <= whole
    assert least_elements({**sizes, "model_type": "mamba"}) == 0
