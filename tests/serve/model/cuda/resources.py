"""What each Triton kernel takes of a GPU, as it was compiled when it was last changed. Needs no Triton."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any, Final

_HERE: Final = Path(__file__).resolve().parent
_CUDA: Final = _HERE.parents[3] / "serve" / "model" / "cuda"
RECORD: Final = _HERE / "resources.json"
"""By kind of kernel, architecture and variant: registers, bytes of stack and of shared memory, columns of tensor memory, narrow
loads, products of warp groups; ``of`` what."""
SHARED_BYTES: Final = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""What a program may have at most, by compute capability: the architectures that are compiled for."""
TENSOR_MEMORY_COLUMNS: Final = {100: 512}
"""What a program may have of it at most, by compute capability; the others have none."""
_SOURCES: Final = (
    *(_CUDA / name for name in ("kernels.py", "layers.py", "linear.py", "linear_kernels.py", "norm_kernels.py", "tiling.py")),
    *(_HERE / name for name in ("compiled.py", "variants.py")),
)


def decided_by() -> dict[str, str]:
    """The version of Triton, and a digest of each source that decides what is compiled, its words and layout left out."""
    return {"triton": importlib.metadata.version("triton"), **{path.name: _digest_of(path.read_text()) for path in _SOURCES}}


def keep(found: dict[str, dict[str, dict[str, dict[str, int]]]]) -> None:
    """Write the record, a variant a line."""
    kinds = [f'"of": {json.dumps(decided_by())}']
    for kind, architectures in found.items():
        parts = [
            f'"{architecture}": {{\n'
            + ",\n".join(f"{json.dumps(name)}: {json.dumps(of)}" for name, of in variants.items())
            + "\n}"
            for architecture, variants in architectures.items()
        ]
        kinds.append(f'"{kind}": {{\n' + ",\n".join(parts) + "\n}")
    RECORD.write_text("{\n" + ",\n".join(kinds) + "\n}\n")


def _digest_of(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):  # strings that stand alone are docstrings
            node.body = [
                each for each in node.body if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))
            ]
        if getattr(node, "type_params", None) == []:  # of Python 3.12 and later
            del node.type_params
    whole: dict[str, Any] = {"show_empty": True} if sys.version_info >= (3, 13) else {}  # as all were told before
    told = ast.dump(tree, **whole)
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def recorded() -> dict[str, Any]:
    """The record."""
    found: dict[str, Any] = json.loads(RECORD.read_text())
    return found
