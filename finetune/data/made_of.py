"""What a layout was made of, kept beside it, so that a resumed run can say which file changed, and how."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from finetune.data.inputs import contents_of, digest, how_read
from finetune.data.sources import Source

_FILE: Final = "made_of.json"
_MOST_FILES = 5
"""Named one by one; of more, the number is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRecord:
    """One source as it was read."""

    files: tuple[tuple[str, int, str], ...]
    """Path, bytes, hash of the content."""
    read_as: Sequence[object]
    """Format, keys and so on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeOf:
    """All that the rows of a run depend on."""

    names: tuple[str, ...]
    """Folder of the tokens of each source."""
    weights: tuple[float, ...]
    num_train: int
    settings: Mapping[str, Any]
    """``finetune.data.layout.Settings``."""
    tokenizer: Sequence[str]
    """Hashes of its files, the chat template's among them."""
    targets: Mapping[str, Any]
    """Keys of ``data`` that choose the targets."""
    sources: tuple[SourceRecord, ...]

    @property
    def fingerprint(self) -> str:
        """Name of the layout; a resumed run must meet the same."""
        return self.renamed(self.names)

    def renamed(self, names: Sequence[str]) -> str:
        """The fingerprint that a layout has whose tokens lie in folders of these names."""
        return digest(list(names), list(self.weights), self.num_train, dict(self.settings))

    def write(self, folder: Path) -> None:
        """Keep this in the layout's folder, where it is not kept yet."""
        file = folder / _FILE
        if not file.is_file():
            work = folder / f"{_FILE}.tmp-{os.getpid()}"
            work.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")
            work.rename(file)


def source_record(source: Source) -> SourceRecord:
    return SourceRecord(files=tuple(contents_of(source)), read_as=how_read(source))


def read_made_of(folder: Path) -> MadeOf | None:
    """What the layout in ``folder`` was made of; ``None`` where that is not kept, as by earlier releases."""
    try:
        tree = json.loads((folder / _FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    sources = tuple(
        SourceRecord(files=tuple((name, size, value) for name, size, value in record["files"]), read_as=record["read_as"])
        for record in tree.pop("sources")
    )
    return MadeOf(**tree | {key: tuple(tree[key]) for key in ("names", "weights")}, sources=sources)


def differences(was: MadeOf, now: MadeOf) -> Iterator[str]:
    """What differs, in words: single files with the kind of their change, then settings by key."""
    if len(was.sources) != len(now.sources) or was.num_train != now.num_train:
        yield f"sources: {_count(was)}, now {_count(now)}"
    before, after = (_by_short_name([file for record in made.sources for file in record.files]) for made in (was, now))
    found = list(_changed_files(before, after))
    yield from found[:_MOST_FILES]
    if len(found) > _MOST_FILES:
        yield f"and {len(found) - _MOST_FILES} files more"
    if not found and list(before.values()) != list(after.values()):
        yield "the files come in another order"
    for number, (one, other) in enumerate(zip(was.sources, now.sources, strict=False)):
        if json.dumps(one.read_as) != json.dumps(other.read_as):
            yield f"source {number + 1} is read as {other.read_as}, was as {one.read_as}"
    if was.weights != now.weights:
        yield f"weight: was {list(was.weights)}, is {list(now.weights)}"
    for key in was.settings:
        if was.settings[key] != now.settings.get(key):
            yield f"data.{key}: was {was.settings[key]}, is {now.settings.get(key)}"
    for key, value in was.targets.items():
        if value != now.targets.get(key):
            yield f"data.{key}: was {value}, is {now.targets.get(key)}"
    if list(was.tokenizer) != list(now.tokenizer):
        yield "the tokenizer or the chat template is another one"


def _count(made: MadeOf) -> str:
    return f"{made.num_train} of training and {len(made.sources) - made.num_train} of evaluation"


def _by_short_name(files: Sequence[tuple[str, int, str]]) -> dict[str, tuple[int, str]]:
    """Files by their paths below the folder that all have in common: where that folder is plays no part."""
    names = [name for name, _, _ in files]
    shared = os.path.commonpath([os.path.dirname(name) for name in names]) if names else ""
    found: dict[str, tuple[int, str]] = {}
    seen: Counter[str] = Counter()
    for name, size, value in files:
        short = os.path.relpath(name, shared) if shared else name
        seen[short] += 1
        found[short if seen[short] == 1 else f"{short} ({seen[short]})"] = (size, value)
    return found


def _changed_files(was: Mapping[str, tuple[int, str]], now: Mapping[str, tuple[int, str]]) -> Iterator[str]:
    gone = {name: content for name, content in was.items() if name not in now}
    for name, content in now.items():
        if name not in was:
            former = next((old for old, same in gone.items() if same == content), None)
            if former is None:
                yield f"{name}: new, {content[0]:,} bytes"
            else:
                del gone[former]
                yield f"{name}: renamed, was {former}"
        elif content != was[name]:
            (old, _), (size, _) = was[name], content
            kind = "other content of the same size" if old == size else f"was {old:,} bytes, is {size:,}"
            yield f"{name}: changed, {kind}"
    for name, (size, _) in gone.items():
        yield f"{name}: gone, {size:,} bytes"
