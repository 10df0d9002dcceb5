"""The word for a target that does not count, in rows, files and losses."""

from __future__ import annotations

from typing import Final

IGNORE_INDEX: Final = -100
"""In place of an id: torch's cross-entropy and transformers leave such targets out."""
