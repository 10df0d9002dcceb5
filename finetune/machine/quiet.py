"""Work that transformers, peft and DeepSpeed do here without a word of their own."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class _Talk(Protocol):
    """What we call of ``transformers.utils.logging``, which has few types."""

    def get_verbosity(self) -> int: ...

    def set_verbosity(self, verbosity: int) -> None: ...

    def set_verbosity_error(self) -> None: ...

    def is_progress_bar_enabled(self) -> bool: ...

    def enable_progress_bar(self) -> None: ...

    def disable_progress_bar(self) -> None: ...


@contextmanager
def quiet() -> Iterator[None]:
    """Without their advice, warnings and progress bars about what is chosen here on purpose. Errors are raised as ever."""
    # DeepSpeed, which the others import, otherwise looks for devices and says so.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from transformers.utils import logging

    talk: _Talk = logging
    before, bars = talk.get_verbosity(), talk.is_progress_bar_enabled()
    talk.set_verbosity_error()
    talk.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        talk.set_verbosity(before)
        if bars:
            talk.enable_progress_bar()
