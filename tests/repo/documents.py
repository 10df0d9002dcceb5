"""The repository's own files, as the tests of this folder read them."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PROGRAMS = {
    "tessera-serve": "serve",
    "tessera-generate": "serve.client",
    "tessera-top": "serve.top",
    "tessera-finetune": "finetune",
}
"""Console commands and the modules that are the same program."""


def markdown_files() -> list[Path]:
    """Every Markdown file of the repository."""
    folders = ["docs", "deploy", "examples", "benchmarks", "protos"]
    return sorted([*REPOSITORY.glob("*.md"), *(page for folder in folders for page in (REPOSITORY / folder).rglob("*.md"))])


def shell_commands(text: str) -> list[list[str]]:
    """The commands of all ``sh`` blocks, split as a shell would; continued lines joined, comments gone."""
    commands = []
    for block in re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if words := shlex.split(line, comments=True):
                commands.append(words)
    return commands


@cache
def help_of(module: str, *subcommand: str) -> str:
    """What ``python -m module [subcommand] --help`` prints; it must exit 0."""
    result = subprocess.run(
        [sys.executable, "-m", module, *subcommand, "--help"], cwd=REPOSITORY, capture_output=True, text=True, timeout=400
    )
    assert result.returncode == 0, f"{module} {' '.join(subcommand)} --help: {result.stderr}"
    return result.stdout


def options_in(help_text: str) -> set[str]:
    """Long options that a help text names."""
    return set(re.findall(r"(?<![\w-])--[a-z][\w.-]*", help_text))
