"""Where compiled kernels are kept: what is refused, in which words, and what needs no permission."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from serve.model.kernels import build
from serve.model.kernels.build import KernelUnavailable, load_cpu_kernels
from tests.support.kernels import cpu_kernels

ADVICE = r"set TESSERA_CACHE_DIR \(--cache-dir\) to a folder"


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A compiler that takes no time: it "builds" what the true one has built, and notes its folder for temporary files."""
    built = Path(cpu_kernels()._name)
    tools = tmp_path / "tools"
    tools.mkdir()
    program = f'#!/bin/sh\necho "$TMPDIR" >> {tools}/notes\nwhile [ "$1" != -o ]; do shift; done\ncp {built} "$2"\n'
    (tools / "c++").write_text(program)
    (tools / "c++").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    return tools


def test_kernels_are_built_once_below_the_folder_that_was_named(compiler: Path, tmp_path: Path) -> None:
    for _ in range(2):
        load_cpu_kernels.__wrapped__(str(tmp_path / "cache"))
    assert [path.suffix for path in (tmp_path / "cache" / "kernels").iterdir()] == [".so"]
    assert len((compiler / "notes").read_text().split()) == 1


def test_the_compiler_needs_no_other_folder_for_temporary_files(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", "/dev/null/tmp")
    load_cpu_kernels.__wrapped__(str(tmp_path / "cache"))
    (used,) = (compiler / "notes").read_text().split()
    assert Path(used).is_relative_to(tmp_path / "cache" / "kernels")


def test_a_folder_that_cannot_be_written_is_named_with_what_to_set() -> None:
    with pytest.raises(KernelUnavailable, match=rf"^/dev/null/x/kernels cannot hold .*Not a directory\); {ADVICE}"):
        load_cpu_kernels("/dev/null/x")


def test_a_folder_that_exists_and_cannot_be_written_is_named_too(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(**_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(build.tempfile, "TemporaryDirectory", read_only)  # root writes everywhere
    with pytest.raises(KernelUnavailable, match=rf"kernels cannot hold .*\(Read-only file system\); {ADVICE}"):
        load_cpu_kernels.__wrapped__(str(tmp_path))


def test_a_cache_that_has_the_kernels_already_is_only_read(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_cpu_kernels.__wrapped__(str(tmp_path))
    monkeypatch.setattr(build.tempfile, "TemporaryDirectory", None)
    (tmp_path / "kernels").chmod(0o500)
    load_cpu_kernels.__wrapped__(str(tmp_path))


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda _: (_ for _ in ()).throw(KeyError()))
    with pytest.raises(KernelUnavailable, match=f"no home folder to keep the compiled kernels in; {ADVICE}"):
        load_cpu_kernels.__wrapped__()


def test_the_cache_of_the_desktop_standard_is_used(compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    load_cpu_kernels.__wrapped__()
    assert list((tmp_path / "xdg" / "tessera" / "kernels").glob("*.so"))


def test_code_that_others_could_have_put_there_is_not_loaded(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels").chmod(0o777)
    with pytest.raises(KernelUnavailable, match=f"can be written by other users, code is not loaded from there; {ADVICE}"):
        load_cpu_kernels(str(tmp_path))


def test_a_build_that_does_not_load_is_told_with_what_to_set(compiler: Path, tmp_path: Path) -> None:
    program = (compiler / "c++").read_text()
    (compiler / "c++").write_text(program[: program.index("cp ")] + 'echo "no program" > "$2"\n')
    with pytest.raises(KernelUnavailable, match=rf"does not load .*; {ADVICE} .*, on a file system without noexec"):
        load_cpu_kernels.__wrapped__(str(tmp_path))


def test_what_a_build_that_was_killed_has_left_is_removed_and_one_that_goes_on_is_not(compiler: Path, tmp_path: Path) -> None:
    kernels = tmp_path / "kernels"
    dead, living, young = (kernels / f"building-{name}" for name in ("dead", "living", "young"))
    for folder in (dead, living, young):
        folder.mkdir(parents=True, mode=0o700)
        (folder / "part.o").touch()
        if folder is not young:
            os.utime(folder, (0, 0))
    kernels.chmod(0o700)
    with build._locked(living):
        load_cpu_kernels.__wrapped__(str(tmp_path))
    assert sorted(path.name for path in kernels.iterdir() if path.is_dir()) == ["building-living", "building-young"]
