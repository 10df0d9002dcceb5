"""The YAML that people start from is read as they will read it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from finetune.cli import load_config
from finetune.config import TuneConfig
from finetune.options import describe
from tests.finetune.support import ROOT, write_config

EXAMPLES = sorted((ROOT / "examples").rglob("*.yaml"))
TRAINING = [path for path in EXAMPLES if "\ndata:" in path.read_text()]


@pytest.mark.parametrize("path", TRAINING, ids=lambda path: path.name)
def test_an_example_is_a_configuration(path: Path) -> None:
    command = "pretrain" if "pretrain" in path.name else "tune"
    assert load_config(path, command=command).run.output.startswith("runs/")


def test_the_guide_names_real_examples_and_keys(tmp_path: Path) -> None:
    guide = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    first, *others = (yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", guide, flags=re.DOTALL))
    assert load_config(write_config(first, tmp_path / "run.yaml")).run.ranks == 2
    for other in others:  # parts of a run, laid over the first
        load_config(write_config({**first, **other}, tmp_path / "part.yaml"))
    keys = {name for name, _, _ in describe(TuneConfig)} | {"model.new", "tokenizer.train"}
    sections = {name.split(".")[0] for name in keys}
    named = {name for name in re.findall(r"`(?:--)?([a-z]+\.[a-z_]+)[`:]", guide) if name.split(".")[0] in sections}
    assert named - keys == set()
    assert len(named) > 10
    for example in re.findall(r"`([a-z0-9/-]+\.yaml)`", guide):
        assert (ROOT / "examples" / example).is_file()
