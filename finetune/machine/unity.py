"""Several C++ sources as one, so that headers they share (torch's take most of the time) are compiled once.

DeepSpeed's file access has a dozen small sources; compiled one by one they take minutes, as one about half a minute.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

_FILE_CONSTANT = re.compile(r"^(?:static\s+)?const\s+[\w:]+\s+(c_\w+)\s*=", re.MULTILINE)
"""Constants of one source, which another may have by the same name."""


def merge_sources(sources: Sequence[Path], include_folders: Sequence[Path], folder: Path) -> Path:
    """Write one source that includes copies of ``sources`` into ``folder``; returns it.

    The copies of headers beside them are included once each; each source's own constants get names of their own.
    ``folder`` must come before ``include_folders`` on the compiler's search path.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for header in (header for place in include_folders for header in place.glob("*.h")):
        (folder / header.name).write_text("#pragma once\n" + header.read_text(encoding="utf-8"), encoding="utf-8")
    lines = []
    for source in sources:
        text = source.read_text(encoding="utf-8")
        for name in set(_FILE_CONSTANT.findall(text)):
            text = re.sub(rf"\b{name}\b", f"{name}_of_{source.stem}", text)
        (folder / source.name).write_text(text, encoding="utf-8")
        lines.append(f'#include "{source.name}"')
    merged = folder / "merged.cpp"
    merged.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return merged
