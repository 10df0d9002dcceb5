"""``log.jsonl``: one object a line, appended while a run lasts; reading it needs nothing heavy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def forget_after(log: Path, step: int) -> None:
    """Drop lines of steps that a resumed run takes again, and a line cut short by a kill."""
    if not log.is_file():
        return
    kept = []
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(entry, dict) and entry.get("step", 0) <= step:
            kept.append(line + "\n")
    work = log.with_name(f"{log.name}.tmp")
    work.write_text("".join(kept), encoding="utf-8")
    work.replace(log)  # a kill in between leaves the log as it was


def read_log(log: Path) -> list[dict[str, Any]]:
    """All whole lines of a run's log."""
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
