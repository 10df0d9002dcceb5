"""What an installed package carries beside its modules."""

from __future__ import annotations

import tomllib

import pytest

from tests.repo.documents import REPOSITORY


@pytest.mark.parametrize("package", ["serve", "checkpoint", "configuration", "finetune", "host", "tessera"])
def test_type_checkers_are_told_that_the_package_is_typed(package: str) -> None:
    data = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert (REPOSITORY / package / "py.typed").is_file()
    assert "py.typed" in data[package]


def test_templates_are_installed() -> None:
    data = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    for template in [*REPOSITORY.glob("finetune/**/*.jinja"), *REPOSITORY.glob("serve/**/*.jinja")]:
        package = ".".join(template.parent.relative_to(REPOSITORY).parts)
        assert any(template.match(pattern) for pattern in data.get(package, [])), f"{template.name} of {package}"
