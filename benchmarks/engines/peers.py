"""Which engines there are: the precisions each has, its environment, what its files are made by, and how it is started."""

from __future__ import annotations

import os
import sys
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.engines.environments import LLAMA_CPP, Unavailable, environment, llama_source, run

OURS: Final = "tessera"
TRANSFORMERS: Final = "transformers"


def usable_cores() -> int:
    """Threads that every engine is given."""
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True, slots=True)
class Start:
    """How an engine is started."""

    python: Path
    module: str
    settings: dict[str, Any]


def _whole(target: Path, write: Callable[[Path], None]) -> Path:
    """A file or folder that is there whole or not at all."""
    if not target.exists():
        print(f"making {target.name}", flush=True)
        unfinished = target.with_name(f"unfinished-{target.name}")
        write(unfinished)
        unfinished.rename(target)
    return target


class Kitchen:
    """Environments and files of engines below one folder, made when they are first asked for and kept."""

    def __init__(self, cache: Path) -> None:
        self._cache = cache.resolve()
        self._models = self._cache / "models"
        self._failed: dict[str, str] = {}

    def environment(self, name: str) -> Path:
        """See ``environment``; one that could not be made is not tried twice in a run."""
        if name in self._failed:
            raise Unavailable(self._failed[name])
        try:
            return environment(self._cache, name)
        except Unavailable as error:
            self._failed[name] = str(error)
            raise

    def checkpoint(self, shape: str) -> Path:
        """The folder of safetensors that every engine's files are made of."""
        old = self._models / f"{shape}-old"
        if not (self._models / shape).exists() or not (old / "tokenizer_config.json").exists():
            print(f"making {shape}", flush=True)
            self._models.mkdir(parents=True, exist_ok=True)
            command = [sys.executable, "-m", "benchmarks.engines.models", shape, str(self._models / shape)]
            run(command, self._cache / "logs" / f"model-{shape}.log")
        return self._models / shape

    def converted(self, shape: str, form: str, precision: str, suffix: str = "") -> Path:
        """A checkpoint in an engine's own format."""
        source = self.checkpoint(shape)
        target = self._models / f"{shape}-{form}-{precision}{suffix}"
        if target.exists():
            return target
        extra = [str(self._llama_cpp())] if form == "gguf" else []
        python = str(self.environment("convert"))

        def write(unfinished: Path) -> None:
            words = [form, str(source.with_name(f"{source.name}-old")), str(unfinished), precision, *extra]
            log = self._cache / "logs" / f"{target.name}.log"
            log.unlink(missing_ok=True)
            run([python, "-m", "benchmarks.engines.convert", *words], log, {"HF_HUB_OFFLINE": "1"})

        return _whole(target, write)

    def _llama_cpp(self) -> Path:
        """The converter of llama.cpp, out of the source distribution that is built."""
        source = llama_source(self._cache)

        def unpack(folder: Path) -> None:
            with tarfile.open(source) as archive:
                for member in archive:
                    name = member.name.partition("/vendor/llama.cpp/")[2]
                    if name.startswith(("conversion/", "gguf-py/", "convert_hf_to_gguf.py")):
                        archive.extract(member, folder, filter="data")

        unpacked = _whole(self._cache / "source" / source.name.removesuffix(".tar.gz"), unpack)
        return next(unpacked.glob("*/vendor/llama.cpp"))


def tessera(kitchen: Kitchen, shape: str, precision: str) -> Start:
    """``tessera-serve``; prompts come again and again, so the prefix cache is off, here and in the peers."""
    dtype = {"fp32": "float32", "bf16": "bfloat16", "int8": "bfloat16"}[precision]
    options = ["--dtype", dtype, "--kv-cache-gib", "2", "--max-step-tokens", "2048", "--no-prefix-caching"]
    if precision == "int8":
        options += ["--quantization", "int8"]
    settings = {"model": str(kitchen.checkpoint(shape)), "options": options}
    return Start(Path(sys.executable), "benchmarks.engines.systems.tessera", settings)


def openvino(kitchen: Kitchen, shape: str, precision: str) -> Start:
    """OpenVINO GenAI: int8 is that of the weights, with bf16 between them."""
    python = kitchen.environment("openvino")
    model = kitchen.converted(shape, "openvino", "int8" if precision == "int8" else "fp32")
    settings = {"model": str(model), "hint": "f32" if precision == "fp32" else "bf16"}
    return Start(python, "benchmarks.engines.systems.openvino", settings)


def llama_cpp(kitchen: Kitchen, shape: str, precision: str) -> Start:
    """llama.cpp: int8 is ``q8_0``."""
    python = kitchen.environment(LLAMA_CPP)
    name = {"fp32": "f32", "bf16": "bf16", "int8": "q8_0"}[precision]
    settings = {"model": str(kitchen.converted(shape, "gguf", name, ".gguf"))}
    return Start(python, "benchmarks.engines.systems.llama_cpp", settings)


def ctranslate2(kitchen: Kitchen, shape: str, precision: str) -> Start:
    """CTranslate2, which has bf16 on some processors alone and says so elsewhere."""
    python = kitchen.environment("ctranslate2")
    model = kitchen.converted(shape, "ctranslate2", "int8" if precision == "int8" else "float32")
    kind = {"fp32": "float32", "bf16": "bfloat16", "int8": "int8"}[precision]
    return Start(python, "benchmarks.engines.systems.ct2", {"model": str(model), "type": kind})


def transformers(kitchen: Kitchen, shape: str, precision: str) -> Start:
    """transformers, which has no int8 for CPUs of its own."""
    if precision == "int8":
        raise Unavailable("transformers has no int8 weights on the CPU without another library")
    settings = {"model": str(kitchen.checkpoint(shape)), "dtype": {"fp32": "float32", "bf16": "bfloat16"}[precision]}
    return Start(Path(sys.executable), "benchmarks.engines.systems.transformers_generate", settings)


ENGINES: Final[dict[str, Callable[[Kitchen, str, str], Start]]] = {
    OURS: tessera,
    "openvino": openvino,
    "llama.cpp": llama_cpp,
    "ctranslate2": ctranslate2,
    TRANSFORMERS: transformers,
}
"""Ours first, then the peers."""
