"""Stand-ins for torch's compiler, for where nothing is compiled: importing it takes as long as all that ranks need of torch."""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch

_COMPILER: Final = "torch._dynamo"
_OPERATOR: Final = f"{_COMPILER}._trace_wrapped_higher_order_op"
_MODE: Final = "TransformGetItemToIndex"
_DECORATORS: Final = ("allow_in_graph", "assume_constant_result", "disable")
"""Decorators of functions that are to be compiled in a way of their own, or not at all. Uncompiled, they are what they are."""


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
    if isinstance(vars(torch).get("_dynamo"), _Later):
        del vars(torch)["_dynamo"]


@contextlib.contextmanager
def replaced(module: types.ModuleType, values: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Within, the module has these functions instead of its own of the same names."""
    own = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(own)


@contextlib.contextmanager
def without_compiler() -> Iterator[None]:
    """Within, decorators of torch's compiler are there and do nothing.

    Whatever else is asked of the compiler imports it. Where it is imported already, nothing is done. No other thread may import
    it meanwhile.
    """
    if _COMPILER in sys.modules:
        yield
        return
    compiler = _Later(_COMPILER, dict.fromkeys(_DECORATORS, _unchanged))
    sys.modules[_COMPILER], sys.modules[_OPERATOR] = compiler, _Later(_OPERATOR, {_MODE: _Mode})
    vars(torch)["_dynamo"] = compiler
    try:
        with replaced(torch.compiler, dict.fromkeys(_DECORATORS, _unchanged)):
            yield
    finally:
        _forget_stand_ins()
