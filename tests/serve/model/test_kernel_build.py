"""Where compiled kernels are kept: what is refused, in which words, what needs no permission, and what was built ahead."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from serve.cli import main
from serve.model.kernels import ahead
from serve.model.kernels import compiler as kernel_compiler
from serve.model.kernels.ahead import LEVELS, build_ahead, find_built
from serve.model.kernels.build import NATIVE, built_for, load_cpu_kernels
from serve.model.kernels.compiler import _HEADERS, _SOURCES, KernelUnavailable, compile_kernels, find_compiler, locked
from tests.support.kernels import cpu_kernels

ADVICE = r"set TESSERA_CACHE_DIR \(--cache-dir\) to a folder"


@pytest.fixture(autouse=True)
def no_kernels_built_ahead(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty folder in place of the package's, whatever was built into that."""
    folder = tmp_path / "ahead"
    monkeypatch.setattr(ahead, "FOLDER", folder)
    return folder


def test_every_source_decides_whether_what_was_built_is_still_good() -> None:
    folder = Path(ahead.__file__).parent
    assert {*_SOURCES, *_HEADERS} == {*folder.glob("*.cpp"), *folder.glob("*.h")}


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
    assert len((compiler / "notes").read_text().split()) == len(_SOURCES) + 1, "each source, and all of them together"


def test_the_compiler_needs_no_other_folder_for_temporary_files(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", "/dev/null/tmp")
    load_cpu_kernels.__wrapped__(str(tmp_path / "cache"))
    (used,) = set((compiler / "notes").read_text().split())
    assert Path(used).is_relative_to(tmp_path / "cache" / "kernels")


def test_a_source_that_does_not_compile_is_told_with_what_the_compiler_says(compiler: Path, tmp_path: Path) -> None:
    (compiler / "c++").write_text('#!/bin/sh\ncase "$*" in *sampling.cpp*) echo "it is wrong" >&2; exit 1;; esac\n')
    with pytest.raises(KernelUnavailable, match=r"c\+\+ failed: it is wrong"):
        load_cpu_kernels.__wrapped__(str(tmp_path))
    assert list((tmp_path / "kernels").iterdir()) == [], "nothing is left of it"


@pytest.mark.parametrize(("cores", "gib", "at_once"), [(1, 64, 1), (8, 64, 8), (8, 1, 2), (8, 0, 1)])
def test_files_are_compiled_side_by_side_as_cores_and_memory_allow(
    monkeypatch: pytest.MonkeyPatch, cores: int, gib: int, at_once: int
) -> None:
    monkeypatch.setattr(kernel_compiler, "usable_cores", lambda: cores)
    monkeypatch.setattr(kernel_compiler, "memory_available", lambda: gib << 30)
    assert kernel_compiler._side_by_side() == at_once


def test_a_folder_that_cannot_be_written_is_named_with_what_to_set() -> None:
    with pytest.raises(KernelUnavailable, match=rf"^/dev/null/x/kernels cannot hold .*Not a directory\); {ADVICE}"):
        load_cpu_kernels("/dev/null/x")


def test_a_folder_that_exists_and_cannot_be_written_is_named_too(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(**_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryDirectory", read_only)  # root writes everywhere
    with pytest.raises(KernelUnavailable, match=rf"kernels cannot hold .*\(Read-only file system\); {ADVICE}"):
        load_cpu_kernels.__wrapped__(str(tmp_path))


def test_a_cache_that_has_the_kernels_already_is_only_read(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_cpu_kernels.__wrapped__(str(tmp_path))
    monkeypatch.setattr(tempfile, "TemporaryDirectory", None)
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
    with locked(living):
        load_cpu_kernels.__wrapped__(str(tmp_path))
    assert sorted(path.name for path in kernels.iterdir() if path.is_dir()) == ["building-living", "building-young"]


@pytest.fixture
def built_ahead(compiler: Path, no_kernels_built_ahead: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of kernels built ahead, for all levels, on a processor that has all; without a compiler from now on."""
    build_ahead([level.name for level in LEVELS], no_kernels_built_ahead)
    monkeypatch.setattr(ahead, "processor_words", lambda: LEVELS[-1].needs)
    monkeypatch.setattr(ahead.platform, "machine", lambda: "x86_64")
    monkeypatch.setenv("PATH", "/nonexistent")
    return no_kernels_built_ahead


def test_kernels_built_ahead_need_no_compiler_and_no_folder(built_ahead: Path) -> None:
    kernels = load_cpu_kernels.__wrapped__("/dev/null/x")
    assert Path(kernels._name).parent == built_ahead
    assert built_for(kernels) == "x86-64-v4-bf16"


@pytest.mark.parametrize("level", LEVELS[:-1], ids=lambda level: level.name)
def test_a_lesser_processor_takes_the_level_that_it_has(
    built_ahead: Path, monkeypatch: pytest.MonkeyPatch, level: ahead.Level
) -> None:
    monkeypatch.setattr(ahead, "processor_words", lambda: level.needs)
    assert built_for(load_cpu_kernels.__wrapped__()) == level.name


def test_a_processor_below_all_levels_is_left_to_its_compiler(built_ahead: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "processor_words", lambda: frozenset({"sse2"}))
    assert find_built() is None


def test_a_compiler_goes_before_a_lesser_level_which_goes_before_none(
    built_ahead: Path, compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for best in built_ahead.glob("cpu-x86-64-v4*"):
        best.unlink()
    assert built_for(load_cpu_kernels.__wrapped__(str(tmp_path))) == "x86-64-v3"
    monkeypatch.setenv("PATH", f"{compiler}:/usr/bin:/bin")
    assert built_for(load_cpu_kernels.__wrapped__(str(tmp_path))) == NATIVE


def test_kernels_of_other_sources_are_neither_taken_nor_kept(
    built_ahead: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "digest_of", lambda *_: "other")
    assert find_built() is None
    monkeypatch.setenv("PATH", f"{compiler}:/usr/bin:/bin")
    (only,) = build_ahead(["x86-64-v3"], built_ahead)
    assert list(built_ahead.glob("*.so")) == [only]


def test_the_command_builds_the_levels_that_are_named_and_says_where(
    compiler: Path, no_kernels_built_ahead: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["build-kernels", "--for", "x86-64-v3,x86-64-v4"]) == 0
    built = sorted(map(str, no_kernels_built_ahead.glob("*.so")))
    assert len(built) == 2
    assert sorted(capsys.readouterr().out.split()) == built
    assert main(["build-kernels", "--for", "x86-64-v9"]) == 2
    assert "'x86-64-v9', which is none of x86-64-v3, x86-64-v4, x86-64-v4-vnni, x86-64-v4-bf16" in capsys.readouterr().err


def test_without_a_compiler_the_command_says_so(
    no_kernels_built_ahead: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert main(["build-kernels"]) == 1
    assert "no C++ compiler" in capsys.readouterr().err


@pytest.mark.slow
def test_every_level_compiles_and_names_its_instructions_rightly(no_kernels_built_ahead: Path) -> None:
    cpu_kernels()  # skips without a compiler
    compiler = find_compiler()
    assert compiler is not None
    no_kernels_built_ahead.mkdir()
    for level in LEVELS:  # -O0 takes an eighth of the time: what is asked is what there is, not how fast
        compile_kernels(compiler, (*level.flags, "-O0"), ahead._library(level, no_kernels_built_ahead))
    found = find_built()
    if found is None:
        pytest.skip("this processor has not the instructions of x86-64-v3")
    kernels = load_cpu_kernels.__wrapped__()
    assert built_for(kernels) == found.level.name
    assert kernels.tessera_linear_supported(0)
    assert kernels.tessera_linear_supported(1)
    # With AVX-512, but without its products of bf16 numbers or bytes, quantized layers of bf16 models are plain torch's.
    has_bf16 = "avx512f" not in found.level.needs or "avx512_bf16" in found.level.needs
    assert bool(kernels.tessera_linear_quantized_supported(1)) is has_bf16
    assert bool(kernels.tessera_linear_rounded_supported()) is ("avx512_vnni" in found.level.needs)
