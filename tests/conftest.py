"""What every test starts from, whatever ran before it and whoever started the run."""

from __future__ import annotations

import collections
import logging
import os
import signal
import sys
from collections.abc import Iterator

# Before torch is imported. Tests run side by side, one thread each; the programs under test set their own number.
os.environ["OMP_NUM_THREADS"] = "1"

import hypothesis
import pytest

# No example has a time limit: a busy machine is not a failure.
hypothesis.settings.register_profile("tessera", deadline=None)
hypothesis.settings.load_profile("tessera")

LONGEST = (
    "tests/finetune/train/test_tune.py",
    "tests/e2e/test_parity.py",
    "tests/serve/model/cuda/test_kernels.py",
    "tests/e2e/test_faults.py",
    "tests/finetune/train/test_resume.py",
    "tests/finetune/commands/test_examples.py",
    "tests/e2e/test_follow.py",
    "tests/finetune/train/test_plain_adamw.py",
    "tests/gpu/test_rehearsals.py",
    "tests/serve/worker/test_family_parity.py",
    "tests/serve/worker/test_recorded_steps.py",
    "tests/finetune/engines/test_stage_optimizers.py",
    "tests/finetune/model/test_adapters.py",
    "tests/finetune/optimizers/test_optimizers.py",
    "tests/serve/worker/test_executor.py",
    "tests/finetune/engines/test_pipeline.py",
    "tests/finetune/engines/test_zero.py",
    "tests/finetune/launch/test_external.py",
    "tests/serve/worker/test_lean_imports.py",
    "tests/e2e/test_stages.py",
    "tests/e2e/test_reload.py",
    "tests/finetune/optimizers/test_zenflow.py",
    "tests/checkpoint/writing/test_crashes.py",
    "tests/serve/worker/test_load_memory.py",
    "tests/checkpoint/readers/test_deepspeed_saves.py",
    "tests/serve/model/test_attention.py",
)
"""Files that take longest, longest first: most of a minute or more."""

OURS = ("serve", "finetune", "checkpoint", "host")
SCRATCH = "SCRATCH_OF_THESE_TESTS"
"""The variable that names a folder of this run, the same for all of its processes; pytest removes it some runs later."""


@pytest.hookimpl(trylast=True)  # what is counted is what was chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where files are dealt out to processes, begin with those that take longest: one that is begun last is waited for alone.

    After ``LONGEST`` come the others, those of many tests first. pytest-xdist keeps this order with ``--no-loadscope-reorder``.
    """
    if not hasattr(config, "workerinput") or config.option.markexpr == "gpu":  # whose tests are in an order of their own
        return
    files = {item.nodeid: item.nodeid.partition("::")[0] for item in items}
    tests = collections.Counter(files.values())
    turns = {name: turn - len(LONGEST) for turn, name in enumerate(LONGEST)}
    items.sort(key=lambda item: (turns.get(name := files[item.nodeid], 0), -tests[name]))


@pytest.fixture(autouse=True)
def _loggers_enabled() -> None:
    """Libraries that configure logging for themselves (the import linter) switch off the loggers they find."""
    for name, logger in logging.root.manager.loggerDict.items():
        if isinstance(logger, logging.Logger) and name.split(".")[0] in OURS:
            logger.disabled = False


@pytest.fixture(autouse=True)
def _gradients_stay_on() -> Iterator[None]:
    """The tests of a process share torch's state: one that turns gradients off would fail others, far away."""
    yield
    if (torch := sys.modules.get("torch")) is not None and not torch.is_grad_enabled():
        torch.set_grad_enabled(True)
        pytest.fail("this test left gradients off for those after it")


@pytest.fixture(autouse=True, scope="session")
def _interrupts_reach_children() -> None:
    """A run in a shell's background inherits an ignored SIGINT and would hand that on to the programs under test."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def _scratch_of_this_run(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp()  # of this process alone, in one of the run, where there are several
    os.environ[SCRATCH] = str(folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder)


@pytest.fixture(autouse=True, scope="session")
def _nothing_left_warm() -> Iterator[None]:
    yield
    if (warm := sys.modules.get("tests.support.warm")) is not None:
        warm.close()
