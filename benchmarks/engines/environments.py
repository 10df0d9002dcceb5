"""A virtual environment for each engine, with pinned versions, since they ask for different ones of the same packages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

REQUIREMENTS: Final = Path(__file__).with_name("requirements")
LLAMA_CPP: Final = "llama-cpp"


class Unavailable(Exception):
    """An engine that cannot be had here, with why."""


def run(command: list[str], log: Path, environment: dict[str, str] | None = None) -> None:
    """Run a command to its end with its output in a file; the end of that is what ``Unavailable`` says if it fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as out:
        done = subprocess.run(
            command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env={**os.environ, **(environment or {})}
        )
    if done.returncode:
        said = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        raise Unavailable(
            f"{Path(command[0]).name} {' '.join(command[1:4])} ended with {done.returncode}: {' | '.join(said[-3:])}"
        )


def environment(cache: Path, name: str) -> Path:
    """The Python of an environment, which is made when it is missing or was made by other requirements.

    Nothing in it is called but its Python, so the folder may be moved.
    """
    wanted = (REQUIREMENTS / f"{name}.txt").read_text(encoding="utf-8")
    folder = cache / "envs" / name
    python, stamp, log = folder / "bin" / "python", folder / "requirements.txt", cache / "logs" / f"environment-{name}.log"
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        return python
    print(f"installing {name} into {folder}", flush=True)
    log.unlink(missing_ok=True)
    run([sys.executable, "-m", "venv", "--clear", str(folder)], log)
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check"]
    if name == LLAMA_CPP:
        others = [line for line in wanted.splitlines() if "==" in line and not line.startswith("llama-cpp")]
        run([*pip, *others, str(llama_source(cache))], log, _native())
    else:
        run([*pip, "-r", str(REQUIREMENTS / f"{name}.txt")], log)
    stamp.write_text(wanted, encoding="utf-8")
    return python


def _native() -> dict[str, str]:
    """How llama.cpp is compiled: for this processor, without what it has for pictures."""
    cores = str(len(os.sched_getaffinity(0)))
    return {"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF", "CMAKE_BUILD_PARALLEL_LEVEL": cores}


def llama_source(cache: Path) -> Path:
    """The source distribution of llama-cpp-python as a file, downloaded once: it is built, and has the converter."""
    folder = cache / "download"
    wanted = next(
        line
        for line in (REQUIREMENTS / f"{LLAMA_CPP}.txt").read_text(encoding="utf-8").splitlines()
        if line.startswith("llama-cpp")
    )
    if not (found := sorted(folder.glob("llama_cpp_python-*.tar.gz"))) or wanted.rpartition("==")[2] not in found[-1].name:
        download = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps", "--no-binary", ":all:"]
        run([*download, "--dest", str(folder), wanted], cache / "logs" / "download-llama-cpp.log")
        found = sorted(folder.glob("llama_cpp_python-*.tar.gz"))
    return found[-1]
