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
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from serve.worker.compiler_stand_ins import replaced, without_compiler

_MISSING: Final = ("is_torch_distributed_available", "is_accelerate_available")


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
            stack.enter_context(replaced(module, dict.fromkeys(_MISSING, _none)))
        stack.enter_context(replaced(import_utils, {"define_import_structure": list_once}))
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
