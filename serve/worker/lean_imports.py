"""Imports what ranks need of libraries without what only training, compiling and sharding need of them, by being imported.

transformers imports torch's compiler, its distributed tensors and accelerate with every model, for decorators, trainers and
loaders that no rank calls: a third of what a rank's start computes. While this module imports ``rank_imports``, transformers is
told that there are no distributed tensors and no accelerate, as on machines that have none; what it takes from the compiler is
there by name and does nothing. Afterwards whoever asks for the compiler gets it.

transformers also reads all of its five hundred models' files, for the names that they define: here only those of families that
are served, so that the others' classes have no name in the package itself. Their own modules have them as ever.

This is for processes that become ranks and nothing else. Where transformers is imported already, it imports as usual.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from serve.model.families import FAMILIES
from serve.worker.compiler_stand_ins import replaced, without_compiler

_AUTO: Final = "auto"
"""The folder of what finds a model's class by its configuration."""
_ASKED: Final = "transformers.utils.import_utils"
_MISSING: Final = ("is_torch_distributed_available", "is_accelerate_available")


Names = dict[frozenset[str], dict[str, set[str]]]
"""What must be installed, to module to the names it defines: transformers' own form."""


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a module and changes it before anything is asked of it."""

    def __init__(self, name: str, path: str, change: Callable[[types.ModuleType], object]) -> None:
        super().__init__(name, path)
        self._change = change

    def exec_module(self, module: types.ModuleType) -> None:
        super().exec_module(module)
        self._change(module)


class _Finder:
    """Finds one module, which is changed as soon as it is there."""

    def __init__(self, name: str, change: Callable[[types.ModuleType], object]) -> None:
        self._name, self._change = name, change

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name == self._name else None
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(name, spec.origin, self._change)
        return spec


def _list_served(list_names: Callable[[str | Path, str | None], Names]) -> Callable[..., Names]:
    """transformers' function that lists the names of a folder of modules, which leaves out models that are not served."""

    def list_served(place: str | Path, prefix: str | None = None) -> Names:
        folder = Path(place).parent if Path(place).is_file() else Path(place)
        if folder.name != "models":
            return list_names(place, prefix)
        found: Names = {}
        for name in (_AUTO, *FAMILIES):
            for needed, modules in list_names(str(folder / name), f"{prefix}.{name}" if prefix else name).items():
                found.setdefault(needed, {}).update(modules)
        return found

    return list_served


@contextlib.contextmanager
def _without_training() -> Iterator[None]:
    """Within, transformers finds neither distributed tensors nor accelerate, and lists the names of models that are served."""
    with contextlib.ExitStack() as stack:
        own: dict[str, Callable[..., bool]] = {}

        def change(module: types.ModuleType) -> None:
            own.update({name: getattr(module, name) for name in _MISSING})
            served = _list_served(module.define_import_structure)
            stack.enter_context(replaced(module, {"define_import_structure": served, **dict.fromkeys(_MISSING, _none)}))

        # The package lists its models while it is imported itself, by a module below it.
        finder = _Finder(_ASKED, change)
        sys.meta_path.insert(0, finder)
        try:
            from transformers import utils
        finally:
            sys.meta_path.remove(finder)
        stack.callback(vars(utils).update, own)
        yield


def _none(*_: object, **__: object) -> bool:
    return False


def _import() -> None:
    if "transformers" in sys.modules:
        importlib.import_module("serve.worker.rank_imports")
        return
    with without_compiler(), _without_training():
        importlib.import_module("serve.worker.rank_imports")


_import()
