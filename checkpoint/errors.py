"""The one error of this package, and how its messages show values."""

from __future__ import annotations

import reprlib
from typing import Any

MAX_FILE_CHARACTERS = 200
MAX_RULE_CHARACTERS = 700


class CheckpointError(Exception):
    """A checkpoint breaks a rule, or could not be written. Reads ``<file>: <rule>``."""

    def __init__(self, file: str, rule: str) -> None:
        file, rule = _fit_to_tell(file, MAX_FILE_CHARACTERS), _fit_to_tell(rule, MAX_RULE_CHARACTERS)
        super().__init__(file, rule)
        self.file = file
        """The file at fault, relative to the checkpoint's folder; the folder itself when no file can be named."""
        self.rule = rule
        """A sentence: what was found and what must hold."""

    def __str__(self) -> str:
        return f"{self.file}: {self.rule}"


def _fit_to_tell(text: str, most: int) -> str:
    """One line of Unicode that is not too long: what a file holds may be neither, and messages travel far."""
    line = text.encode("utf-8", "backslashreplace").decode("utf-8").replace("\n", " ").replace("\r", " ")
    return line if len(line) <= most else f"{line[: most // 2]} ... {line[-most // 2 :]}"


class _Brief(reprlib.Repr):
    """Looks at no more of a value than is shown: what a pickle holds can be short in the file and very long written out."""

    def repr1(self, x: Any, level: int) -> str:
        return self.repr_dict(x, level) if isinstance(x, dict) else super().repr1(x, level)


_BRIEF = _Brief()
_BRIEF.maxlevel, _BRIEF.maxdict, _BRIEF.maxlist, _BRIEF.maxtuple, _BRIEF.maxstring, _BRIEF.maxlong = 4, 16, 16, 16, 80, 80


def shown(value: object) -> str:
    """A value for a message, cut where it is long."""
    text = repr(value) if isinstance(value, str | int) else _BRIEF.repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
