"""The settings of a GPT-NeoX run, which its checkpoints keep as they were written: YAML files, or JSON, in ``configs/``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import yaml

from checkpoint.disk.folder import MAX_JSON_DEPTH, Folder
from checkpoint.errors import CheckpointError, shown

CONFIGS = "configs"
"""The folder of them inside a checkpoint."""

_SUFFIXES = (".yml", ".yaml", ".json")
_MAX_BYTES = 1 << 20
_MAX_FILES = 64


@dataclass(frozen=True, slots=True)
class Settings:
    """What all files together say, by keys with underscores."""

    values: Mapping[str, Any]
    files: Mapping[str, str]
    """The file that has each key."""

    def refuse(self, key: str, rule: str) -> NoReturn:
        """Raise what is said of a key's value."""
        said = f"{key} is {shown(self.values[key])}" if key in self.values else f"{key} is not set"
        raise CheckpointError(self.files.get(key, CONFIGS), f"{said}; {rule}")

    def text(self, key: str, default: str = "") -> str:
        """A name, in lower case."""
        value = self.values.get(key, default)
        if value is None:
            return default
        if not isinstance(value, str):
            self.refuse(key, "it must be a name")
        return value.lower()

    def switch(self, key: str, default: bool = False) -> bool:
        """Whether the setting is true; ``default`` where it is not there or ``null``.

        Raises:
            CheckpointError: it is neither true nor false.
        """
        value = self.values.get(key, default)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.refuse(key, "it must be true or false")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """The setting's number, from 1 up; ``default`` where it is not there.

        Raises:
            CheckpointError: it is no such number, or neither it nor a default is there.
        """
        found = self.optional_count(key)
        if found is not None:
            return found
        if default is None:
            self.refuse(key, "a number from 1 up must be given")
        return default

    def optional_count(self, key: str) -> int | None:
        """A number from 1 up; ``None`` where there is none."""
        value = self.values.get(key)
        if value is None:
            return None
        if type(value) is not int or not 1 <= value < 1 << 31:
            self.refuse(key, "it must be a number from 1 up")
        return value

    def optional_whole(self, key: str) -> int:
        """A number from 0 up; 0 where there is none."""
        return 0 if self.values.get(key) == 0 else self.optional_count(key) or 0

    def share(self, key: str) -> float:
        """A number from 0 to 1, 0 where there is none."""
        value = self.values.get(key)
        if value is None:
            return 0.0
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
            self.refuse(key, "it must be a number from 0 to 1")
        return float(value)

    def number(self, key: str, default: float) -> float:
        """A finite number above 0. Without a point before its exponent YAML takes one for a text."""
        value = self.values.get(key)
        if value is None:
            return default
        try:
            found = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else 0.0
        except (ValueError, OverflowError):
            found = 0.0
        if not 0.0 < found < 1e300:
            self.refuse(key, "it must be a finite number above 0")
        return found


def read_settings(folder: Folder, *, above: bool = False) -> Settings | None:
    """The settings in ``configs/`` of a checkpoint's folder; ``None`` where there are none.

    Args:
        above: those beside the folder, where the 20B model and what ``merge20b.py`` writes have them.

    Raises:
        CheckpointError: a file is no such YAML, or two give one key different values.
    """
    place, where = (Folder(folder.path.parent), f"../{CONFIGS}") if above else (folder, CONFIGS)
    if not place.has(CONFIGS) or not (place.path / CONFIGS).is_dir():
        return None
    inner = place.below(CONFIGS)
    names = [name for name in inner.names() if name.endswith(_SUFFIXES)]
    if len(names) > _MAX_FILES:
        raise CheckpointError(where, f"holds {len(names)} files of settings; at most {_MAX_FILES} are read")
    values: dict[str, Any] = {}
    files: dict[str, str] = {}
    for name in names:
        path = f"{where}/{name}"
        for key, value in _parsed(path, inner.read_bytes(name, limit=_MAX_BYTES)).items():
            plain = key.replace("-", "_")
            if plain in values and values[plain] != value:
                rule = f"{key} is {shown(value)}; {files[plain]} gives it as {shown(values[plain])}"
                raise CheckpointError(path, rule)
            values[plain], files[plain] = value, path
    return Settings(values, files) if values else None


class _Loader(yaml.SafeLoader):
    """Plain values; nothing is said twice and nothing refers to something else in the file, which could make it large."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.constructor.ConstructorError(problem="an alias stands for another value")
        if self._depth > MAX_JSON_DEPTH:
            raise yaml.constructor.ConstructorError(problem=f"it is nested more than {MAX_JSON_DEPTH} deep")
        self._depth += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        found = super().construct_mapping(node, deep=deep)
        if len(found) != len(node.value):
            seen: set[Any] = set()
            for key, _ in node.value:
                if key.value in seen:
                    problem = f"the key {shown(key.value)} is given twice"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                seen.add(key.value)
            raise yaml.constructor.ConstructorError(None, None, "a key is given twice", node.start_mark)
        return found


def _parsed(path: str, data: bytes) -> dict[str, Any]:
    try:
        found = yaml.load(data.decode("utf-8"), Loader=_Loader)
    except (yaml.YAMLError, ValueError, RecursionError, TypeError) as error:
        raise CheckpointError(path, f"is no YAML that is read: {error}") from error
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise CheckpointError(path, "must be an object of named values")
    return found
