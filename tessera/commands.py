"""The console commands. What is not installed, or lies in the way, is told of in a sentence before anything else happens."""

from __future__ import annotations

import importlib
import sys

from tessera import neighbours


def serve() -> int:
    """Run ``tessera-serve``, the server; returns its exit code."""
    return _run("tessera-serve", "serve", "serve.cli", "main")


def generate() -> int:
    """Run ``tessera-generate``, the client; returns its exit code."""
    return _run("tessera-generate", "client", "serve.client.cli", "main")


def health() -> int:
    """Run ``tessera-health``; returns its exit code.

    Other distributions are not looked for: a probe runs it every few seconds.
    """
    return _run("tessera-health", "client", "serve.client.health", "main", looks_around=False)


def top() -> int:
    """Run ``tessera-top``, which shows a server; returns its exit code."""
    return _run("tessera-top", "serve", "serve.top.cli", "main")


def finetune() -> int:
    """Run ``tessera-finetune``, the training commands; returns its exit code."""
    return _run("tessera-finetune", "train", "finetune.__main__", "run")


def _run(program: str, extra: str, module: str, function: str, *, looks_around: bool = True) -> int:
    if in_place := neighbours.found_in_place(*neighbours.NAMES):
        print(f"{program}: {' '.join(in_place)}", file=sys.stderr)
        return 1
    try:
        command = getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        top = (error.name or "").partition(".")[0]
        if top in neighbours.NAMES:
            _tell_of_others(program)
            raise
        print(f"{program}: {error.name!r} is not installed; pip install 'tessera[{extra}]' brings it", file=sys.stderr)
        return 1
    if looks_around:
        _tell_of_others(program)
    return int(command())


def _tell_of_others(program: str) -> None:
    for sentence in neighbours.installed_over():
        print(f"{program}: warning: {sentence}", file=sys.stderr)
