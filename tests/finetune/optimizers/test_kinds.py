"""What is told of an optimizer where torch is not imported is what its kind declares."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import pytest

import finetune
from finetune.config import DataConfig, ModelConfig, OffloadConfig, OptimizerConfig, RunConfig, TuneConfig, ZeroConfig
from finetune.errors import ConfigError
from finetune.forecast import least
from finetune.optimizers.kinds import KINDS

NAMES = typing.get_args(typing.get_type_hints(OptimizerConfig)["name"])
"""What ``optimizer.name`` may be."""


def tune(name: Any, **sections: Any) -> TuneConfig:
    return TuneConfig(
        run=RunConfig(output="out"),
        data=DataConfig(train=("text",)),
        model=ModelConfig(path="model"),
        optimizer=OptimizerConfig(name=name),
        **sections,
    )


def test_every_optimizer_that_a_configuration_names_has_its_kind_and_none_is_left_over() -> None:
    plain = {tune(name).algorithm for name in NAMES}
    apart = tune("adamw", offload=OffloadConfig(optimizer="cpu", method="zenflow")).algorithm
    assert {*plain, apart} == KINDS.keys()


def test_the_least_that_is_kept_of_an_element_is_what_its_kind_declares() -> None:
    declared = {
        name: 4 * min(len(kind.keys_of(matrix=matrix)) for matrix in (False, True))  # fp32
        for name, kind in KINDS.items()
    }
    assert declared == least._STATE_BYTES


NEW = """
from __future__ import annotations

import torch

from finetune.config import TuneConfig
from finetune.optimizers.kind import Groups, OptimizerKind, rate_of


def make(config: TuneConfig, groups: Groups, matrices: frozenset[str]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=rate_of(config), momentum=config.optimizer.momentum)


KIND = OptimizerKind(make=make, state=("momentum_buffer",){options})
"""
USE = """
import torch

from finetune.config import (
    DataConfig, ModelConfig, OffloadConfig, OptimizerConfig, RunConfig, TokenizerConfig, TuneConfig, ZeroConfig
)
from finetune.engines.zero.optimizer import choose_optimizer
from finetune.errors import ConfigError
from finetune.forecast.least import check_least
from finetune.forecast.memory import KINDS


def tune(name, **offload):
    return TuneConfig(
        run=RunConfig(output="out"),
        data=DataConfig(train=("text",)),
        model=ModelConfig(new={"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "vocab_size": 32}),
        tokenizer=TokenizerConfig(path="tokenizer"),
        zero=ZeroConfig(stage=3),
        offload=OffloadConfig(**offload),
        optimizer=OptimizerConfig(name=name, lr=0.5, momentum=0.0, weight_decay=0.0),
    )


check_least(tune("descent"))
model = torch.nn.Linear(2, 1)
optimizer = choose_optimizer(tune("descent"), model, cpu_adam=False)
before = model.weight.detach().clone()
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
assert torch.equal(model.weight, before - 0.5), (before, model.weight)
print(KINDS["descent"].keys_of(matrix=True), KINDS["of_matrices"].keys_of(matrix=True))
try:
    choose_optimizer(tune("of_matrices", optimizer="nvme", path="disk"), model, cpu_adam=False)
except ConfigError as refused:
    print(refused)
"""


def test_a_new_optimizer_is_one_file(tmp_path: Path) -> None:
    shutil.copytree(Path(finetune.__file__).parent, tmp_path / "finetune", ignore=shutil.ignore_patterns("__pycache__"))
    algorithms = tmp_path / "finetune" / "optimizers" / "algorithms"
    (algorithms / "descent.py").write_text(NEW.replace("{options}", ""))
    (algorithms / "of_matrices.py").write_text(NEW.replace("{options}", ", matrix_state=()"))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", USE], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    *_, keys, refused = ran.stdout.splitlines()
    assert keys == "('momentum_buffer',) ()"
    assert refused.startswith("offload.optimizer is 'nvme'; it must be none or cpu with optimizer.name of_matrices"), refused


@pytest.mark.parametrize("name", NAMES)
def test_disks_are_refused_an_optimizer_that_treats_matrices_in_its_own_way(name: str) -> None:
    refused = ""
    try:
        tune(name, zero=ZeroConfig(stage=3), offload=OffloadConfig(optimizer="nvme", path="disk"))
    except ConfigError as error:
        refused = str(error)
    assert ("while it updates them" in refused) is (KINDS[name].matrix_state is not None), refused
