"""What this machine is: cores, memory, limits, compiler, GPUs, versions. Nothing heavy is imported."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import sysconfig
from functools import cache
from pathlib import Path

from host import limits

usable_cores = limits.usable_cores
memory_bytes = limits.memory_total
cgroup_memory_limit = limits.memory_limit


def memlock_bytes() -> int | None:
    """Memory this process may pin; ``None`` is unlimited."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def search_path() -> str:
    """PATH, with the folder of this interpreter in front: pip puts ninja there, activated or not."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def compiler() -> str | None:
    """The C++ compiler that torch would call, ``$CXX`` or ``c++``; ``None`` where there is none."""
    return shutil.which(os.environ.get("CXX", "c++"), path=search_path())


def ninja() -> str | None:
    """The ninja that torch would call; ``None`` where there is none."""
    return shutil.which("ninja", path=search_path())


def python_headers() -> str | None:
    """The path of ``Python.h``, which every extension needs; ``None`` where it is missing."""
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return str(header) if header.is_file() else None


def libaio() -> str | None:
    """The header of libaio, which NVMe offload needs."""
    folders = ["/usr/include", "/usr/local/include", *os.environ.get("CPATH", "").split(os.pathsep)]
    return next(
        (str(Path(folder) / "libaio.h") for folder in folders if folder and (Path(folder) / "libaio.h").is_file()), None
    )


@cache
def gpus() -> list[tuple[str, int | None]]:
    """Name and bytes of each GPU that torch may train on, in the order of CUDA's numbers.

    ``None`` bytes of one that does not tell, as where it shares the host's memory. A torch for CPUs alone has none. Asked once
    in the life of a process.
    """
    if "+cpu" in (version_of("torch") or ""):
        return []
    program = Path(__file__).with_name("cuda_devices.py")
    try:
        answer = subprocess.run([sys.executable, "-I", "-S", program], capture_output=True, text=True, timeout=60, check=True)
        return [(name, size) for name, size in json.loads(answer.stdout)]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []


def gpu_memory_bytes() -> list[int | None]:
    """Bytes of each GPU that torch may train on, as ``gpus`` has them."""
    return [size for _, size in gpus()]


def version_of(distribution: str) -> str | None:
    """The installed version of a distribution; ``None`` where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_description() -> str:
    """Name of the processor and the vector instructions that matter here."""
    name, flags = platform.machine(), ""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                name = value.strip()
            elif key.strip() in ("flags", "Features"):
                flags = value
                break
    except OSError:
        pass
    vectors = [flag for flag in ("avx2", "avx512bw", "avx512_bf16", "amx_bf16") if flag in flags.split()]
    return f"{name} ({', '.join(vectors)})" if vectors else name


def cpu_flags() -> str:
    """Every instruction set of the processor: what is compiled for one machine may not run on another."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
