"""``constraints.txt`` is one complete set of versions inside the ranges of ``pyproject.toml``."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.repo.documents import REPOSITORY


def constraints() -> dict[str, Version]:
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): Version(version) for name, version in pins}


def declared() -> list[Requirement]:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    groups = (project["dependencies"], *project["optional-dependencies"].values())
    everything = (Requirement(text) for group in groups for text in group)
    return [requirement for requirement in everything if requirement.name != project["name"]]  # an extra of an extra


@pytest.mark.parametrize("requirement", declared(), ids=str)
def test_the_tested_version_lies_in_the_declared_range(requirement: Requirement) -> None:
    pins = constraints()
    name = canonicalize_name(requirement.name)
    assert name in pins, f"{requirement.name} has no line in constraints.txt"
    assert requirement.specifier.contains(pins[name], prereleases=True)


def test_every_transitive_dependency_is_pinned() -> None:
    """Walks what the installed distributions ask for. Only CUDA builds of torch ask for names that are left out."""
    pins = constraints()
    missing = set()
    seen: set[str] = set()
    todo = [(requirement.name, requirement.extras) for requirement in declared()]
    while todo:
        raw_name, extras = todo.pop()
        name = canonicalize_name(raw_name)
        for_cuda = name.startswith(("nvidia-", "cuda-")) and name not in pins
        if name in seen or for_cuda or name == "setuptools":
            continue
        seen.add(name)
        if name not in pins:
            missing.add(name)
        try:
            wanted = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        for text in wanted:
            requirement = Requirement(text)
            if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
                todo.append((requirement.name, requirement.extras))
    assert not missing
    assert not set(pins) - seen, "constraints.txt pins what nothing asks for"


def test_the_page_on_gpus_tells_of_the_torch_that_is_pinned() -> None:
    told = set(re.findall(r"torch==([\d.]+\d)", (REPOSITORY / "docs/gpu.md").read_text()))
    assert told == {str(constraints()["torch"])}, "its CUDA, and so the driver, may be others: see what its wheel asks for"


def test_the_three_large_parts_are_the_promised_ones() -> None:
    pins = constraints()
    assert (str(pins["torch"]), str(pins["deepspeed"]), str(pins["transformers"])) == ("2.13.0", "0.19.8", "5.23.0")
