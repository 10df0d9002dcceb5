"""``tessera``: the client under a name of its own, and what it says of other packages with the names of its parts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import serve.client
import tessera
from tests.repo.documents import REPOSITORY

ASKED = "import sys, tessera; tessera.Client; print(*sorted({name.partition('.')[0] for name in sys.modules}))"


def python(*words: str, folder: Path, before: Path | None = None) -> subprocess.CompletedProcess[str]:
    """This Python in a folder, which like an interactive one looks into it first."""
    code = (
        f"import sys; sys.path[:0] = [{str(before)!r}] if {before is not None} else []; sys.path.append({str(REPOSITORY)!r});"
    )
    return subprocess.run(
        [sys.executable, "-c", code + words[0], *words[1:]], cwd=folder, capture_output=True, text=True, timeout=600
    )


def test_it_has_every_name_of_the_client_and_they_are_the_same() -> None:
    assert tessera.__all__ == serve.client.__all__
    assert all(getattr(tessera, name) is getattr(serve.client, name) for name in tessera.__all__)
    assert set(tessera.__all__) <= set(dir(tessera))
    with pytest.raises(AttributeError, match="'tessera' has no attribute 'nothing'"):
        _ = tessera.nothing


def test_the_client_is_imported_when_it_is_asked_for_and_brings_grpc_and_protobuf_alone(tmp_path: Path) -> None:
    before = python("import tessera; print('serve' in sys.modules, 'grpc' in sys.modules)", folder=tmp_path)
    assert before.stdout.split() == ["False", "False"], before.stderr
    after = python(ASKED, folder=tmp_path)
    assert after.returncode == 0, after.stderr
    loaded = set(after.stdout.split())
    assert {"grpc", "google", "serve"} <= loaded
    assert not loaded & {"torch", "numpy", "yaml", "msgspec", "transformers", "rich", "checkpoint", "finetune", "host"}


@pytest.mark.parametrize("program", ["serve", "generate", "health", "finetune"])
def test_another_package_of_a_general_name_that_is_found_first_is_told_with_its_place(tmp_path: Path, program: str) -> None:
    (tmp_path / "serve").mkdir()
    (tmp_path / "serve" / "__init__.py").touch()
    asked = python(ASKED, folder=tmp_path, before=tmp_path)
    assert f"ImportError: Python finds 'serve' at {tmp_path}/serve, which is another package than Tessera's" in asked.stderr
    started = python(f"from tessera import commands; sys.exit(commands.{program}())", folder=tmp_path, before=tmp_path)
    assert started.returncode == 1
    assert started.stderr.startswith(f"tessera-{program}: Python finds 'serve' at {tmp_path}/serve")


def test_another_distribution_that_installs_over_ours_is_told_by_its_name(tmp_path: Path) -> None:
    site = tmp_path / "site"
    about, package = site / "rows-1.0.dist-info", site / "checkpoint"
    for folder in (about, package):
        folder.mkdir(parents=True)
    (package / "__init__.py").touch()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: rows\nVersion: 1.0\n")
    (about / "RECORD").write_text("checkpoint/__init__.py,,\nrows-1.0.dist-info/METADATA,,\n")
    code = f"sys.path.append({str(site)!r}); from tessera import commands; sys.argv = ['tessera-generate', '--help']; "
    told = python(code + "commands.generate()", folder=tmp_path)
    assert "tessera-generate: warning: the package 'checkpoint' is also installed by rows, whose files" in told.stderr
    assert told.stdout.startswith("usage: tessera-generate")


def test_a_command_whose_extra_is_not_installed_says_which_brings_it(tmp_path: Path) -> None:
    code = "sys.modules['yaml'] = None; from tessera import commands; sys.exit(commands.serve())"
    told = python(code, folder=tmp_path)
    assert told.returncode == 1
    assert told.stderr == "tessera-serve: 'yaml' is not installed; pip install 'tessera[serve]' brings it\n"
