"""``log.jsonl``: one object a line, appended while a run lasts; reading it needs nothing heavy."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def forget_after(log: Path, step: int) -> None:
    """Drop lines of steps that a resumed run takes again, and a line cut short by a kill."""
    if not log.is_file():
        return
    kept = "".join(f"{line}\n" for line, entry in _lines(log) if entry.get("step", 0) <= step)
    work = log.with_name(f"{log.name}.tmp")
    work.write_text(kept, encoding="utf-8")
    work.replace(log)  # a kill in between leaves the log as it was


def last_step(log: Path) -> int:
    """The newest step that the log tells of; 0 without any."""
    return max((int(entry.get("step", 0)) for _, entry in _lines(log)), default=0)


def tokens_at(log: Path, step: int) -> int | None:
    """Target tokens taken in all after ``step``; ``None`` where the log does not say."""
    return next((int(entry["tokens"]) for _, entry in _lines(log) if entry.get("step") == step and "tokens" in entry), None)


def _lines(log: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The lines that are whole, each with its object; none of a log that is not there."""
    if not log.is_file():
        return
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(entry, dict):
            yield line, entry


def read_log(log: Path) -> list[dict[str, Any]]:
    """All whole lines of a run's log."""
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
