"""Imports what ranks need of libraries without what only training, compiling and sharding need of them, by being imported.

transformers imports torch's compiler, its distributed tensors and accelerate with every model, for decorators, trainers and
loaders that no rank calls: a third of what a rank's start computes. While this module imports ``rank_imports``, transformers is
told that there are no distributed tensors and no accelerate, as on machines that have none; what it takes from the compiler is
there by name and does nothing; and it lists its own files once instead of twice. Afterwards everything is as it was: whoever
asks for the compiler then gets it.

This is for processes that become ranks and nothing else. Where transformers is imported already, it imports as usual.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch

_COMPILER: Final = "torch._dynamo"
_OPERATOR: Final = f"{_COMPILER}._trace_wrapped_higher_order_op"
_MODE: Final = "TransformGetItemToIndex"
_DECORATORS: Final = ("allow_in_graph", "assume_constant_result", "disable")
"""Of functions that are to be compiled in a way of their own, or not at all. Uncompiled, they are what they are."""
_MISSING: Final = ("is_torch_distributed_available", "is_accelerate_available")


def _unchanged(function: Callable[..., Any] | None = None, *_: object, **__: object) -> Callable[..., Any]:
    """A decorator, with options or without, that decorates nothing."""
    return (lambda decorated: decorated) if function is None else function


class _Later(types.ModuleType):
    """Stands for a module that is imported when something is asked of it that ``known`` does not have."""

    def __init__(self, name: str, known: dict[str, Any]) -> None:
        super().__init__(name)
        self._known = known

    def __getattr__(self, name: str) -> Any:
        known: dict[str, Any] = self.__dict__["_known"]
        if name == "__path__" and self.__name__ == _OPERATOR:  # asked of every module: it is no package
            raise AttributeError(name)
        return known[name] if name in known else getattr(_real(self.__name__), name)


class _Mode:
    """The compiler's mode of the same name, imported when one is made."""

    def __new__(cls) -> Any:
        return getattr(_real(_OPERATOR), _MODE)()


def _real(name: str) -> types.ModuleType:
    """The module itself, in the place of what stands for it."""
    _forget_stand_ins()
    return importlib.import_module(name)


def _forget_stand_ins() -> None:
    for name in (_OPERATOR, _COMPILER):
        if isinstance(sys.modules.get(name), _Later):
            del sys.modules[name]
    if isinstance(torch.__dict__.get("_dynamo"), _Later):
        del torch.__dict__["_dynamo"]


@contextlib.contextmanager
def _replaced(module: types.ModuleType, values: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Within, the module has these functions instead of its own of the same names."""
    own = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(own)


@contextlib.contextmanager
def _without_compiler() -> Iterator[None]:
    """Within, decorators of torch's compiler are there and do nothing."""
    if _COMPILER in sys.modules:
        yield
        return
    compiler = _Later(_COMPILER, dict.fromkeys(_DECORATORS, _unchanged))
    sys.modules[_COMPILER], sys.modules[_OPERATOR] = compiler, _Later(_OPERATOR, {_MODE: _Mode})
    torch.__dict__["_dynamo"] = compiler
    try:
        with _replaced(torch.compiler, dict.fromkeys(_DECORATORS, _unchanged)):
            yield
    finally:
        _forget_stand_ins()


@contextlib.contextmanager
def _without_training() -> Iterator[None]:
    """Within, transformers finds neither distributed tensors nor accelerate, and lists the files of its models once."""
    from transformers import utils
    from transformers.utils import import_utils

    listed = import_utils.define_import_structure

    def list_once(place: str | Path, prefix: str | None = None) -> Any:
        folder = Path(place).parent if Path(place).is_file() else Path(place)
        # As transformers itself asked for them: the answers are kept by argument.
        return listed(folder if folder.name == "models" else str(folder), prefix)

    with contextlib.ExitStack() as stack:
        for module in (utils, import_utils):
            stack.enter_context(_replaced(module, dict.fromkeys(_MISSING, _none)))
        stack.enter_context(_replaced(import_utils, {"define_import_structure": list_once}))
        yield


def _none(*_: object, **__: object) -> bool:
    return False


def _import() -> None:
    if "transformers" in sys.modules:
        importlib.import_module("serve.worker.rank_imports")
        return
    with _without_compiler(), _without_training():
        importlib.import_module("serve.worker.rank_imports")


_import()
