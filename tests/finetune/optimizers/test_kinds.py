"""What is told of an optimizer where torch is not imported is what its kind declares."""

from __future__ import annotations

import typing
from typing import Any

import pytest

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
    assert all(kind.name == name for name, kind in KINDS.items())


def test_the_least_that_is_kept_of_an_element_is_what_its_kind_declares() -> None:
    declared = {
        name: 4 * min(len(kind.keys_of(matrix=matrix)) for matrix in (False, True))  # fp32
        for name, kind in KINDS.items()
    }
    assert declared == least._STATE_BYTES


@pytest.mark.parametrize("name", NAMES)
def test_disks_are_refused_an_optimizer_that_treats_matrices_in_its_own_way(name: str) -> None:
    refused = ""
    try:
        tune(name, zero=ZeroConfig(stage=3), offload=OffloadConfig(optimizer="nvme", path="disk"))
    except ConfigError as error:
        refused = str(error)
    assert ("while it updates them" in refused) is (KINDS[name].matrix_state is not None), refused
