"""The Makefile and the script of continuous integration do what the documents say."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import yaml
from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports

from tests.repo.documents import REPOSITORY


def recipe_of(target: str) -> str:
    """The commands make would run, with the environment taken as installed."""
    result = subprocess.run(
        ["make", "-n", "-o", ".venv/.installed", target],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    return result.stdout


def test_check_contains_every_check_and_the_tests() -> None:
    recipe = recipe_of("check")
    for part in ("ruff check", "ruff format", "mypy", "lint-imports", "protos/generate.py --check", "pytest"):
        assert part in recipe, part


def test_continuous_integration_runs_make_check() -> None:
    script = REPOSITORY / ".ci/run"
    assert os.access(script, os.X_OK)
    assert re.search(r"^exec make check$", script.read_text(), re.MULTILINE)


def test_modules_that_targets_run_exist() -> None:
    for target in ("demo", "bench", "bench-gpu", "test", "test-gpu", "proto", "proto-check"):
        for module in re.findall(r"-m ([a-z][\w.]*)", recipe_of(target)):
            if module not in ("pytest", "gpu"):
                path = REPOSITORY / module.replace(".", "/")
                assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), f"{target} runs {module}"


def test_an_old_python_is_refused_with_a_sentence() -> None:
    result = subprocess.run(
        ["make", "-s", "setup", "PYTHON=/bin/false", "VENV=.cache/no-such-environment"],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert result.returncode != 0
    assert "Python 3.11 or newer" in result.stderr


def test_import_contracts_hold(capsys) -> None:
    status = lint_imports(config_filename=str(REPOSITORY / "pyproject.toml"), no_cache=True)
    assert status == EXIT_STATUS_SUCCESS, capsys.readouterr().out


def test_the_example_configuration_is_accepted_and_explained() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "serve", "--config", "examples/serve.yaml", "--print-config"],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    resolved = yaml.safe_load(result.stdout)
    given = yaml.safe_load((REPOSITORY / "examples/serve.yaml").read_text())
    for section, values in given.items():
        assert resolved[section] == resolved[section] | values
