"""Imports torch without its table of what operators do on ``meta``, by being imported.

With itself torch imports Python definitions of some thousand operators, for its compiler and for tensors that have no memory: a
quarter of the time that torch takes. A rank's model is built on ``meta`` by operators that torch has in C++. The table
(``torch._meta_registrations``) and what comes with it are imported when somebody asks for one of them: the compiler does.

This is for processes that become ranks. Where torch is imported already, nothing is done.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from typing import Final

_TABLE: Final = "torch._meta_registrations"
_WITH_IT: Final = frozenset(("torch._decomp", "torch._dynamo", "torch._prims", "torch._refs", "torch.utils._content_store"))
"""Modules that the table imports, or that import one another in a circle where the table was not first."""


class _TableFirst:
    """Finds no module, but sees to it that the table is there before some others are imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None) -> ModuleSpec | None:
        if name == _TABLE or name in _WITH_IT:
            with contextlib.suppress(ValueError):  # another thread has removed it
                sys.meta_path.remove(self)
            if name != _TABLE:
                importlib.import_module(_TABLE)
        return None


def _import() -> None:
    if "torch" in sys.modules:
        return
    sys.modules[_TABLE] = stand_in = types.ModuleType(_TABLE)
    try:
        torch = importlib.import_module("torch")
    finally:
        if sys.modules.get(_TABLE) is stand_in:
            del sys.modules[_TABLE]
    if vars(torch).get("_meta_registrations") is stand_in:
        del vars(torch)["_meta_registrations"]
    sys.meta_path.insert(0, _TableFirst())


_import()
