"""Work that transformers, peft and DeepSpeed do here without a word of their own."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet() -> Iterator[None]:
    """Without their advice, warnings and progress bars about what is chosen here on purpose. Errors are raised as ever."""
    # DeepSpeed, which the others import, otherwise looks for devices and says so.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from transformers.utils import logging

    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()
