"""The one error of this package."""

from __future__ import annotations


class CheckpointError(Exception):
    """A checkpoint breaks a rule, or could not be written. Reads ``<file>: <rule>``."""

    def __init__(self, file: str, rule: str) -> None:
        # Names of files may be no Unicode, and messages travel to places that take nothing else.
        file, rule = (text.encode("utf-8", "backslashreplace").decode("utf-8") for text in (file, rule))
        super().__init__(file, rule)
        self.file = file
        """The file at fault, relative to the checkpoint's folder; the folder itself when no file can be named."""
        self.rule = rule
        """A sentence: what was found and what must hold."""

    def __str__(self) -> str:
        return f"{self.file}: {self.rule}"
