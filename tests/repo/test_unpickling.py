"""Nothing that serves turns bytes into objects of whoever wrote them, nor runs code that a checkpoint brings."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SERVING = ("serve", "checkpoint", "host", "configuration", "tessera")
_ALLOWED = {"checkpoint/readers/files/pickles.py: pickle.Unpickler"}
"""The reader that knows tables of tensors only; how it is held to that is tested with it."""
_PICKLE_CALLS = {"load", "loads", "Unpickler"}
_FORBIDDEN_MODULES = {"cloudpickle", "dill", "joblib", "marshal", "shelve"}
_FORBIDDEN_CALLS = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "recv_pyobj",
    "scatter_object_list",
}
"""Each unpickles what another process sent."""


def found(source: str, name: str) -> Iterator[str]:
    """What a file must not do, by the file and the word for it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if (owner in ("pickle", "_pickle") and node.attr in _PICKLE_CALLS) or (owner, node.attr) == ("torch", "load"):
                yield f"{name}: {owner}.{node.attr}"
            if node.attr in _FORBIDDEN_CALLS:
                yield f"{name}: {node.attr}"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            modules = {alias.name for alias in node.names} if isinstance(node, ast.Import) else {node.module or ""}
            taken = {alias.name for alias in node.names} if isinstance(node, ast.ImportFrom) else set()
            yield from (f"{name}: {module}" for module in modules & _FORBIDDEN_MODULES)
            yield from (f"{name}: {word}" for word in taken & _FORBIDDEN_CALLS)
            if modules & {"pickle", "_pickle", "torch", "torch.serialization"}:
                yield from (f"{name}: {word}" for word in taken & {*_PICKLE_CALLS, "load"})
        elif isinstance(node, ast.keyword) and node.arg in ("trust_remote_code", "weights_only"):
            is_off = isinstance(node.value, ast.Constant) and node.value.value is (node.arg == "weights_only")
            if not is_off:
                yield f"{name}: {node.arg}"


def test_no_bytes_of_others_are_unpickled_but_by_the_reader_of_tables() -> None:
    words = {
        word
        for part in SERVING
        for path in (ROOT / part).rglob("*.py")
        for word in found(path.read_text(), str(path.relative_to(ROOT)))
    }
    assert words == _ALLOWED


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("import pickle\npickle.loads(b'')", "pickle.loads"),
        ("from pickle import loads", "loads"),
        ("import torch\ntorch.load('x')", "torch.load"),
        ("from torch import load", "load"),
        ("import dill", "dill"),
        ("dist.broadcast_object_list([1])", "broadcast_object_list"),
        ("AutoModel.from_pretrained('x', trust_remote_code=True)", "trust_remote_code"),
        ("AutoModel.from_pretrained('x', trust_remote_code=given)", "trust_remote_code"),
        ("read('x', weights_only=False)", "weights_only"),
    ],
)
def test_each_of_the_ways_to_do_so_is_seen(source: str, word: str) -> None:
    assert f"a.py: {word}" in set(found(source, "a.py"))


def test_what_is_said_to_be_off_is_let_pass() -> None:
    assert list(found("f(trust_remote_code=False, weights_only=True)", "a.py")) == []
