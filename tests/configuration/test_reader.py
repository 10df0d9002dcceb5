"""Files, options and text become dataclasses; every mistake is told by place, key and rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pytest

from configuration import Reader, Tree, keys_of


class Refused(Exception):
    """What this command raises."""


class BrokenRule(Refused, ValueError):
    """A value breaks its rule."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One of a list."""

    path: str
    """Where."""
    weight: float = 1.0
    """How often."""

    def __post_init__(self) -> None:
        if self.weight <= 0:
            raise BrokenRule(f"weight is {self.weight}; it must be greater than 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A section."""

    size: int | None = None
    """How large,
    in whole."""
    share: float = 0.5
    action: Literal["on", "off", "note"] = "off"
    plot: bool = False
    name: str = ""
    entries: tuple[str | Entry, ...] = ()
    extra: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Whole:
    """All."""

    part: Part = field(default_factory=Part)
    more: Part | None = None


READER = Reader(Refused, replaced={"part.old": "set part.size"})


def whole(folder: Path, text: str, *overrides: tuple[str, str]) -> Whole:
    file = folder / "a.yaml"
    file.write_text(text)
    tree = READER.read(file)
    READER.lay_over(tree, overrides)
    return READER.build(Whole, tree)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("share: 1e-3", Part(share=1e-3)),
        ("share: '.5'", Part(share=0.5)),
        ("share: 1", Part(share=1.0)),
        ("size: '12'", Part(size=12)),
        ("size: none", Part()),
        ("size:", Part()),
        ("action: off", Part(action="off")),
        ("action: on", Part(action="on")),
        ("action: true", Part(action="on")),
        ("plot: yes", Part(plot=True)),
        ("plot: 'off'", Part(plot=False)),
        ("name: off", Part(name="off")),
        ("name: none", Part(name="none")),
        ("name: 12", Part(name="12")),
        ("name: 2021-01-01", Part(name="2021-01-01")),
        ("entries: a", Part(entries=("a",))),
        ("entries: [a, {path: b, weight: 2}]", Part(entries=("a", Entry(path="b", weight=2.0)))),
        ("entries: {path: b}", Part(entries=(Entry(path="b"),))),
        ("extra: {cache: no, deep: [on, {a: 'on'}]}", Part(extra={"cache": False, "deep": [True, {"a": "on"}]})),
        ("old: false", Part()),
    ],
)
def test_a_value_is_what_its_field_asks_for(tmp_path: Path, text: str, expected: Part) -> None:
    assert whole(tmp_path, f"part: {{{text}}}").part == expected


@pytest.mark.parametrize("text", ["", "part:\n", "# nothing\n", "part: {}\nmore: null\n"])
def test_what_holds_nothing_says_nothing(tmp_path: Path, text: str) -> None:
    assert whole(tmp_path, text) == Whole()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("part:\n  size: 1.5", "a.yaml, line 2: part.size is 1.5; it must be a whole number or none"),
        ("part:\n  size: true", "a.yaml, line 2: part.size is True; it must be a whole number or none"),
        ("part: {share: fast}", "a.yaml, line 1: part.share is 'fast'; it must be a number"),
        ("part: {share: 1" + "0" * 400 + "}", "it must be a number"),
        ("part: {plot: 1}", "a.yaml, line 1: part.plot is 1; it must be true or false"),
        ("part: {name: [a]}", "a.yaml, line 1: part.name is ['a']; it must be text"),
        ("part: {name: null}", "a.yaml, line 1: part.name is None; it must be text"),
        ("part: {action: ask}", "a.yaml, line 1: part.action is 'ask'; it must be one of on, off, note"),
        ("part: 3", "a.yaml, line 1: part is 3; it must be a mapping of keys to values"),
        ("more: [3]", "a.yaml, line 1: more is [3]; it must be a mapping of keys to values"),
        ("part: {extra: 3}", "a.yaml, line 1: part.extra is 3; it must be a mapping of keys to values"),
        ("part:\n  sise: 1", "a.yaml, line 2: unknown key part.sise; did you mean part.size? (allowed under part: size,"),
        ("prat: {}", "a.yaml, line 1: unknown key prat; did you mean part? (allowed at the top: part, more)"),
        ("part: {old: true}", "a.yaml, line 1: part.old is no longer a key: set part.size"),
        (
            "part:\n  entries:\n  - a\n  - path: b\n    weight: 0",
            "a.yaml, line 5: part.entries[1].weight is 0.0; it must be greater than 0",
        ),
        ("part:\n  entries:\n  - a\n  - kind: b", "a.yaml, line 4: unknown key part.entries[1].kind (allowed under"),
        ("part:\n  entries:\n  - a\n  - {}", "a.yaml, line 4: part.entries[1].path is not set; it has no default"),
        ("part:\n  entries: [a, [b]]", "a.yaml, line 2: part.entries is ['b']; it must be text"),
        ("part: {size: 1}\npart: {}", "a.yaml, line 2: part is set twice"),
        ("part:\n  size: 1\n  size: 2", "a.yaml, line 3: part.size is set twice"),
        ("part: {1: 2}", "a.yaml, line 1: key 1 is not text"),
        ("- part", "a.yaml: the file must hold a mapping of keys to values"),
        ("part: {size: 1", "a.yaml, line 1: not valid YAML: while parsing a flow mapping, expected ',' or '}'"),
        ("part: !!python/name:os.system", "a.yaml, line 1: not valid YAML: could not determine a constructor"),
        ("part: {size: 1" + "0" * 5000 + "}", "a.yaml: not valid YAML: Exceeds the limit"),
        ("part: {name: \x07}", "a.yaml: not valid YAML: unacceptable character"),
        ("a: " + "[" * 500, "a.yaml: not valid YAML: maximum recursion depth"),
        ("a: " + "[" * 50 + "]" * 50, "a.yaml, line 1: nested more than 40 levels deep"),
        ("a: &a [*a]", "a.yaml, line 1: nested more than 40 levels deep"),
        ("a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in pairwise("abcdefghijklmnopqrs")), "30000 values"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_file_is_told_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(Refused) as refused:
        whole(tmp_path, text)
    assert message in str(refused.value)
    assert str(refused.value).startswith(str(tmp_path))
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_there_or_not_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"no\.yaml: cannot be read: No such file or directory"):
        READER.read(tmp_path / "no.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(Refused, match=r"bytes\.yaml: cannot be read: 'utf-8'"):
        READER.read(tmp_path / "bytes.yaml")


def test_the_last_option_counts_and_is_named_instead_of_the_file(tmp_path: Path) -> None:
    text = "part:\n  size: 1\n  name: a"
    found = whole(tmp_path, text, ("part.size", "2"), ("part.size", "3"), ("more.plot", "true"))
    assert (found.part.size, found.part.name, found.more) == (3, "a", Part(plot=True))
    for overrides, message in (
        ([("part.size", "x")], "command line, --part.size: part.size is 'x'; it must be a whole number"),
        ([("part", "{size: x}")], "command line, --part: part.size is 'x'; it must be a whole number"),
        ([("part.sise", "1")], "command line, --part.sise: unknown key part.sise; did you mean part.size?"),
        ([("part.size", "[1")], "command line, --part.size: '[1' is not a YAML value: "),
        (
            [("part.name.first", "a")],
            "line 3: part.name is 'a'; it must be a mapping of keys to values for command line, --part",
        ),
    ):
        with pytest.raises(Refused) as refused:
            whole(tmp_path, text, *overrides)
        assert message in str(refused.value)


def test_a_missing_section_and_a_value_of_no_file_need_no_place() -> None:
    with pytest.raises(Refused, match=r"^part\.share is \[\]; it must be a number$"):
        READER.build(Whole, Tree({"part": {"share": []}}))


def test_every_key_has_its_type_default_and_meaning() -> None:
    keys = {key.name: key for key in keys_of(Whole)}
    assert (keys["part.size"].meaning, keys["part.size"].shown_default) == ("How large, in whole.", "None")
    assert keys["part.entries[].path"].shown_default == "required"
    assert keys["more.share"].default == 0.5
    assert keys["part.plot"].hint is bool
