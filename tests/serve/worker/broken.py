"""Checkpoint folders that are broken in one way each: every kind of file, every kind of fault, by a seed."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.models import save

_JSON = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
_SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
_INDEX = "model.safetensors.index.json"
FILES: tuple[str, ...] = (*_JSON, "chat_template.jinja", _INDEX, *_SHARDS)

_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 509, 10**18, -(10**18), 10**400, 0.5, -0.5, 1e-300, float("nan"), float("inf")),
    *("", "x", "\ud800", "x" * 100_000, [], {}, [-1], [0, 1], ["x"], {"x": 1}, [[["global"], 10**9]]),
    {"rope_type": "default", "rope_theta": -1.0},
)


def make_sample(family: str, folder: Path) -> Path:
    """A small model of two shards, with a tokenizer and a chat template: every file of ``FILES``."""
    save(family, folder, max_shard_size="420KB")
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<|endoftext|>"}')
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    return folder


@dataclass(frozen=True, slots=True)
class Fault:
    """What is done to one file."""

    file: str
    name: str
    apply: Callable[[Path], None]

    def __str__(self) -> str:
        return f"{self.file}: {self.name}"


def faults(seed: int, count: int, sample: Path) -> Iterator[Fault]:
    """``count`` faults, the same for the same seed; ``sample`` is a folder as they will be applied to."""
    make = random.Random(seed)
    whole = [Fault(file, name, apply) for file in FILES for name, apply in _WHOLE.items()]
    make.shuffle(whole)
    yield from whole[: count // 3]
    for number in range(count - len(whole[: count // 3])):
        kind = number % 3
        if kind == 0:
            yield _of_a_byte(make, make.choice(FILES), sample)
        elif kind == 1:
            yield _of_a_value(make, "config.json" if number % 2 else make.choice((*_JSON[1:], _INDEX)), sample)
        else:
            yield _of_a_header(make, make.choice(_SHARDS), sample)


def _write(data: bytes) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        path.unlink()
        path.write_bytes(data)

    return apply


def _link_out(path: Path) -> None:
    elsewhere = path.parent.parent / f"elsewhere-{path.name}"
    shutil.copyfile(path, elsewhere)
    path.unlink()
    path.symlink_to(elsewhere)


def _put(make: Callable[[Path], None]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        path.unlink()
        make(path)

    return apply


_WHOLE: dict[str, Callable[[Path], None]] = {
    "is missing": Path.unlink,
    "is empty": _write(b""),
    "is a folder": _put(Path.mkdir),
    "is a pipe": _put(os.mkfifo),
    "is a link to nothing": _put(lambda path: path.symlink_to("nowhere")),
    "is a link to itself": _put(lambda path: path.symlink_to(path.name)),
    "is a link out of the folder": _link_out,
    "is a link to /dev/zero": _put(lambda path: path.symlink_to("/dev/zero")),
    "is a list": _write(b"[]"),
    "is a number": _write(b"1"),
    "is no UTF-8": _write(b'{"model_type": "\xff"}'),
    "is UTF-16": _write('{"model_type": "gpt_neox"}'.encode("utf-16")),
    "is deep": _write(b'{"a": ' + b"[" * 500 + b"]" * 500 + b"}"),
    "is bottomless": _write(b'{"a": ' + b"[" * 1_000_000),
    "is of zeros": _write(bytes(4096)),
    "has a key twice": _write(b'{"eos_token_id": 0, "eos_token_id": 1}'),
    "is cut in half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "has one byte less": lambda path: os.truncate(path, path.stat().st_size - 1),
    "has one byte more": lambda path: path.write_bytes(path.read_bytes() + b"\xfe"),
    "begins with a byte order mark": lambda path: path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes()),
}


def _of_a_byte(make: random.Random, file: str, sample: Path) -> Fault:
    place, value = make.randrange((sample / file).stat().st_size), make.randrange(1, 256)

    def apply(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[place] ^= value
        path.write_bytes(data)

    return Fault(file, f"byte {place} ^ {value}", apply)


def _of_a_value(make: random.Random, file: str, sample: Path) -> Fault:
    """One value of a JSON file replaced or removed, at any depth; or a key added that other families have."""
    content = json.loads((sample / file).read_text())
    trail, change, name = _changed(make, content)

    def apply(path: Path) -> None:
        path.write_text(json.dumps(change))

    return Fault(file, f"{trail} {name}", apply)


def _changed(make: random.Random, content: Any) -> tuple[str, Any, str]:
    content = copy.deepcopy(content)
    inner, trail = content, ""
    while True:
        keys = list(inner) if isinstance(inner, dict) else list(range(len(inner)))
        key = make.choice(keys)
        trail += f"/{key}"
        if isinstance(inner[key], dict | list) and inner[key] and make.random() < 0.8:
            inner = inner[key]
            continue
        break
    if make.random() < 0.15:
        del inner[key]
        return trail, content, "is gone"
    inner[key] = make.choice(_VALUES)
    return trail, content, f"is {inner[key]!r:.40}"


def _of_a_header(make: random.Random, file: str, sample: Path) -> Fault:
    data = (sample / file).read_bytes()
    length = int.from_bytes(data[:8], "little")
    trail, header, name = _changed(make, json.loads(data[8 : 8 + length]))
    text = json.dumps(header).encode()

    def apply(path: Path) -> None:
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])

    return Fault(file, f"header {trail} {name}", apply)
