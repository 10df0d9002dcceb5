"""The doctor says what is there, what is missing, and what that costs."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from finetune.cli import main
from finetune.commands import doctor
from finetune.machine import inventory, ops
from serve.options import all_options


def test_the_report_names_everything_and_exits_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    wanted = {
        "torch",
        "deepspeed",
        "c++ compiler",
        "ninja",
        "libaio",
        "memory",
        "cgroup memory limit",
        "memlock limit",
        "/dev/shm",
    }
    assert wanted <= set(report["findings"])
    assert report["findings"]["torch"]["value"] == inventory.version_of("torch")


def test_the_table_shows_the_remedy_of_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    findings = doctor.examine()
    found = {finding.name: finding for finding in findings}
    assert found["c++ compiler"].state == "note"
    out = io.StringIO()
    doctor.show(findings, Console(file=out, width=160))
    assert "apt-get install g++" in out.getvalue()


def test_a_missing_package_is_essential(monkeypatch: pytest.MonkeyPatch) -> None:
    real = inventory.version_of
    monkeypatch.setattr(inventory, "version_of", lambda name: None if name == "deepspeed" else real(name))
    findings = doctor.examine()
    assert doctor.exit_code(findings) == 1
    assert [finding.name for finding in findings if finding.state == "missing"] == ["deepspeed"]


def test_built_operations_are_kept_per_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("TORCH_EXTENSIONS_DIR", "TESSERA_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    here = ops.extensions_folder()
    assert here.is_relative_to(tmp_path)
    real = inventory.version_of
    monkeypatch.setattr(inventory, "version_of", lambda name: "0.0.1" if name == "deepspeed" else real(name))
    assert ops.extensions_folder() != here


def test_without_a_compiler_nothing_is_built_and_the_reason_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("TORCH_EXTENSIONS_DIR", "TESSERA_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    said: list[str] = []
    adam = ops.ensure(ops.CPU_ADAM, said.append)
    assert not adam.available
    assert "no C++ compiler" in adam.reason
    assert said == []


def test_a_folder_that_cannot_be_written_is_named_with_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("TESSERA_CACHE_DIR", "/dev/null/cache")
    said: list[str] = []
    adam = ops.ensure(ops.CPU_ADAM, said.append)
    assert not adam.available
    assert adam.reason.startswith("/dev/null/cache/torch_extensions/")
    assert adam.reason.endswith("(Not a directory); set TESSERA_CACHE_DIR to a folder that can be written")
    assert said == []


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCH_EXTENSIONS_DIR", "TESSERA_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda _: (_ for _ in ()).throw(KeyError()))
    adam = ops.ensure(ops.CPU_ADAM, lambda _: None)
    assert not adam.available
    assert adam.reason.endswith("set TESSERA_CACHE_DIR to a folder that can be written")


def test_training_and_serving_keep_what_they_compile_below_the_same_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("TESSERA_CACHE_DIR", str(tmp_path))
    assert ops.extensions_folder().parent == tmp_path / "torch_extensions"
    assert next(option.variable for option in all_options() if option.key == "kernels.cache_dir") == "TESSERA_CACHE_DIR"


def test_a_compiler_that_fails_is_announced_and_then_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    for name in ("TORCH_EXTENSIONS_DIR", "TESSERA_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(broken))
    said: list[str] = []
    adam = ops.ensure(ops.CPU_ADAM, said.append)
    assert "CPU Adam" in said[0]
    assert " s, once" in said[0]
    assert len(said) == 1, "nothing is said of what is not built and not missed"
    assert not adam.available
    assert "could not be built" in adam.reason
    assert not list(ops.extensions_folder().glob("building-*"))
