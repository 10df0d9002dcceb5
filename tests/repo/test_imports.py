"""The import graph as it is: what the contracts of ``pyproject.toml`` cannot say."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
import tomllib
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from types import ModuleType

import grimp
import pytest

import checkpoint
import configuration
import finetune
import host
import serve

REPOSITORY = Path(__file__).resolve().parents[2]
OURS = ("serve", "finetune", "checkpoint", "configuration", "host", "tessera")


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    """Every import of every module, inside functions and for types alone as well."""
    return grimp.build_graph(*OURS, cache_dir=None)


def test_no_module_imports_itself_by_way_of_others(graph: grimp.ImportGraph) -> None:
    arrows = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        pytest.fail(f"an import circle: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize(
    ("contract", "key", "package", "but"),
    [
        ("of the engine, ranks know only", "forbidden_modules", "serve.engine", {"executor", "plan"}),
        ("grpc only in rpc, client", "source_modules", "serve", {"__main__", "client", "rpc", "v1"}),
    ],
)
def test_a_contract_that_lists_the_modules_of_a_package_has_all_of_them(
    graph: grimp.ImportGraph, contract: str, key: str, package: str, but: set[str]
) -> None:
    contracts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (listed,) = (set(one[key]) for one in contracts if one["name"].startswith(contract))
    assert graph.find_children(package) - {f"{package}.{name}" for name in but} <= listed


def test_training_has_at_most_eight_modules_outside_its_rooms() -> None:
    flat = sorted(path.name for path in Path(finetune.__file__).parent.glob("*.py"))
    assert len(flat) <= 8, flat


@pytest.mark.parametrize("package", [serve, finetune, checkpoint, configuration, host], ids=lambda package: package.__name__)
def test_every_package_says_what_it_is_for(package: ModuleType) -> None:
    found = [package.__name__, *(m.name for m in pkgutil.walk_packages(package.__path__, f"{package.__name__}.") if m.ispkg)]
    generated = [name for name in found if name.startswith("serve.v1")]
    silent = [name for name in found if name not in generated and not importlib.import_module(name).__doc__]
    assert not silent


@pytest.mark.parametrize("script", ["docs/rooms.py", "docs/families.py"])
def test_what_is_drawn_and_listed_from_the_code_is_what_it_says(script: str) -> None:
    drawn = subprocess.run([sys.executable, script, "--check"], cwd=REPOSITORY, capture_output=True, text=True, timeout=400)
    assert (drawn.returncode, drawn.stderr) == (0, "")
