"""The one error of this package."""

from __future__ import annotations

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
