"""What a run's folder keeps of its forecast and of its measurement; reading it needs nothing heavy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from finetune.units import in_gib

FORECAST: Final = "forecast.json"
MEASURED: Final = "measured.json"


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write whole or not at all."""
    work = path.with_name(f".{path.name}.tmp")
    work.write_text(json.dumps(values, indent=2, default=str) + "\n", encoding="utf-8")
    work.replace(path)


def read_json(path: Path) -> dict[str, Any] | None:
    """The object of a file; ``None`` if there is none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) else None


def beside(output: Path) -> str | None:
    """One line: measured peaks beside the forecast; ``None`` where one of the two is missing."""
    said, seen = read_json(output / FORECAST), read_json(output / MEASURED)
    if said is None or seen is None:
        return None
    parts = []
    for what, key in (("host memory", "host_bytes"), ("device memory a rank", "device_bytes")):
        forecast, measured = said.get(key), seen.get(key)
        if forecast and measured:
            difference = 100 * (forecast - measured) / measured
            parts.append(f"{what} {in_gib(measured)} GiB (forecast {in_gib(forecast)}, {difference:+.0f} %)")
    if seen.get("disk_bytes"):
        parts.append(f"disk {in_gib(seen['disk_bytes'])} GiB (forecast at most {in_gib(said.get('disk_bytes', 0))})")
    return f"peaks: {'; '.join(parts)}" if parts else None
