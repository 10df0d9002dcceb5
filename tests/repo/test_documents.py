"""Commands, paths and links in the documents lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.repo.documents import PROGRAMS, REPOSITORY, help_of, markdown_files, options_in

PAGES = markdown_files()
MADE_BY_RUNNING = ("demo-out", "runs", ".venv")
"""Folders that documents may name although a fresh clone does not have them."""


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_lead_to_files(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    local = [target for target in targets if not re.match(r"[a-z]+:", target)]
    assert [target for target in local if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_paths_in_code_spans_exist(page: Path) -> None:
    spans = re.findall(r"`([A-Za-z.][\w./-]*/[\w./-]*)`", page.read_text())
    roots = {path.name for path in REPOSITORY.iterdir()} - {*MADE_BY_RUNNING}
    local = [span for span in spans if span.split("/")[0] in roots]
    missing = [span for span in local if not (REPOSITORY / span).exists() and not (REPOSITORY / f"{span}.py").exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_make_targets_exist(page: Path) -> None:
    named = re.findall(r"(?:`|^|\s)make ([a-z][a-z-]*)(?=`|\s*#|$)", page.read_text(), re.MULTILINE)
    assert set(named) <= make_targets()


@pytest.mark.parametrize("module", PROGRAMS.values())
def test_programs_explain_themselves(module: str) -> None:
    assert "usage" in help_of(module).lower()


def test_inline_examples_of_our_commands_name_real_options() -> None:
    """Options in code spans, such as ``--drain-seconds``, wherever they stand in the documents."""
    known = {"--build-arg", "--help"} | set().union(*(options_in(help_of(module)) for module in PROGRAMS.values()))
    for subcommand in ("merge", "tune", "plan", "export", "inspect", "evaluate", "predict", "doctor"):
        known |= options_in(help_of("finetune", subcommand))
    for subcommand in ("build-kernels", "agent", "token"):
        known |= options_in(help_of("serve", subcommand))
    known |= options_in(help_of("deploy.launchers.ray_nodes"))
    for page in PAGES:
        used = set(re.findall(r"`(--[a-z][\w-]*)[ =`]", page.read_text()))
        assert used <= known, f"{page.relative_to(REPOSITORY)} names {used - known}"


def test_the_licence_is_the_one_that_is_declared() -> None:
    text = (REPOSITORY / "LICENSE").read_text()
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
