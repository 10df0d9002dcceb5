"""Programs of ours as processes that need not import anything: forked from one that has, once for each run of tests.

Importing torch, transformers and DeepSpeed is most of what a small server or a small run of training does. What is forked is
the program itself, with its own arguments, environment, output and processes; it ends as programs do. Where a variable is set
that is read while Python starts or a library is imported, the program is started anew.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from host.forked import ForkedProcess, ForkServer

ROOT = Path(__file__).resolve().parents[2]

_SERVING = ("torch", "serve.worker.rank_loop", "serve.worker.rank_imports", "deepspeed.module_inject.auto_tp", "serve.app")
_TRAINING = (
    "finetune.cli",
    "finetune.launch.rank",
    "finetune.launch.local",
    "finetune.engines.zero.engine",
    "finetune.train.begin",
    # What a run takes once it needs it: a second of computing for each that forecasts, makes an optimizer and draws its curves.
    "finetune.commands.train",
    "finetune.launch.run",
    "finetune.forecast.check",
    "finetune.machine.build_ops",
    "tests.support.processor",
    "setuptools",
    "distutils.ccompiler",
    "deepspeed.ops.op_builder.all_ops",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.gpt_neox.modeling_gpt_neox",
    "transformers.models.llama.modeling_llama",
    "matplotlib.backends.backend_agg",
    "matplotlib.backends.backend_svg",
    "matplotlib.figure",
    "PIL.BmpImagePlugin",
    "PIL.GifImagePlugin",
    "PIL.JpegImagePlugin",
    "PIL.PpmImagePlugin",
    "peft",
    "rich._emoji_codes",
    "torch.utils.tensorboard",
)
_READ_EARLY = ("PYTHON", "HF_", "HUGGINGFACE", "TRANSFORMERS", "TORCH", "DS_", "LD_", "MALLOC", "MPL", "GOMP", "HOME", "XDG")
_SET = {
    "DS_ACCELERATOR": "cpu",
    "GOMP_SPINCOUNT": "20000",
    "THP_MEM_ALLOC_ENABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "PYTHONUNBUFFERED": "1",
}


class Program(ForkedProcess):
    """A forked program, as ``subprocess.Popen`` with pipes of text for its output shows one."""

    def __init__(self, pid: int, stdout: int, stderr: int) -> None:
        super().__init__(pid)
        self.stdout: IO[str] = os.fdopen(stdout, encoding="utf-8")
        self.stderr: IO[str] = os.fdopen(stderr, encoding="utf-8")

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """All of its output, once it has ended.

        Raises:
            subprocess.TimeoutExpired: it has not, ``timeout`` seconds later.
        """
        said = {"stdout": "", "stderr": ""}

        def read(name: str) -> None:
            said[name] = getattr(self, name).read()

        readers = [threading.Thread(target=read, args=(name,), daemon=True) for name in said]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join(timeout)
        self.close()
        return said["stdout"], said["stderr"]

    def close(self) -> None:
        self.stdout.close()
        self.stderr.close()


class _Warm:
    """The process that programs are forked from, once it is wanted."""

    def __init__(self) -> None:
        self.server: ForkServer | None = None
        self.seen: dict[str, str] = {}

    def start(self) -> ForkServer:
        if self.server is None:
            self.seen = _early(os.environ)
            self.server = ForkServer([*_SERVING, *_TRAINING, __name__], {**os.environ, **_SET})
        return self.server


_warm = _Warm()


def close() -> None:
    """End what programs were forked from."""
    if _warm.server is not None:
        _warm.server.close()
        _warm.server = None


def can_fork(environment: Mapping[str, str]) -> bool:
    """Whether a program would find with these variables what was imported without them."""
    _warm.start()
    return _early(environment) == _warm.seen


def _early(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_READ_EARLY)}


def start(
    module: str, words: Sequence[str], environment: Mapping[str, str] | None = None, *, new_session: bool = False
) -> Program:
    """``python -m MODULE WORDS`` in the project's folder, without the imports; ``environment`` instead of ours."""
    out, their_out = os.pipe()
    err, their_err = os.pipe()
    try:
        with open(os.devnull, "rb") as nothing:
            forked = _warm.start().spawn(
                f"{__name__}:run_module",
                [module, *words],
                environment={**(environment or os.environ), "PYTHONUNBUFFERED": "1"},
                descriptors=(nothing.fileno(), their_out, their_err),
                new_session=new_session,
            )
    finally:
        os.close(their_out)
        os.close(their_err)
    return Program(forked.pid, out, err)


def all_ended(programs: Sequence[Program], seconds: float) -> list[str]:
    """What programs that wait for one another said of errors, once all have ended.

    Raises:
        subprocess.TimeoutExpired: one had not, so many seconds after the one before it; all are killed then.
    """
    try:
        return [program.communicate(seconds)[1] for program in programs]
    finally:
        for program in programs:
            program.kill()


# -- in the forked process


def run_module(words: list[str]) -> int:
    """Be a program."""
    import torch

    module, *arguments = words
    os.chdir(ROOT)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))  # which was read when it was imported
    if module == "finetune":
        from finetune.launch import local

        local.subprocess = _with_forked_ranks(ForkServer([*_TRAINING, __name__], os.environ))  # type: ignore[assignment, attr-defined]  # its place in that module
    return _run(module, arguments)


def run_rank(words: list[str]) -> int:
    """Be a rank of training."""
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    return _run("finetune.launch.rank", words)


def _run(module: str, words: Sequence[str]) -> int:
    sys.argv = [module, *words]
    warnings.filterwarnings("ignore", message=".*found in sys.modules", category=RuntimeWarning)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


def _with_forked_ranks(server: ForkServer) -> types.SimpleNamespace:
    """``subprocess`` as the launcher of training sees it, with ranks forked as well."""

    def start_rank(
        command: Sequence[str], *, env: Mapping[str, str], stdin: int, stdout: IO[bytes], stderr: int, pass_fds: Sequence[int],
        start_new_session: bool,
    ) -> Any:  # fmt: skip
        read, write = os.pipe()
        given = {**env, "TESSERA_CONSOLE_FD": "3"} if pass_fds else env
        log = stdout.fileno()
        try:
            process: Any = server.spawn(
                f"{__name__}:run_rank", command[-1:], environment=given, descriptors=(read, log, log, *pass_fds),
                new_session=start_new_session,
            )  # fmt: skip
        finally:
            os.close(read)
        process.stdin = os.fdopen(write, "wb")
        return process

    return types.SimpleNamespace(**{**vars(subprocess), "Popen": start_rank})
