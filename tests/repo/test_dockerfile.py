"""What the Dockerfile's steps install is what the sources say, file by file; without a container and without a network.

The image itself is built and started by ``make test-image``.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from setuptools import find_packages

from tests.repo.documents import REPOSITORY

PIP = """\
#!/bin/bash
# The image's pip: the wheel for real, without an index.
exec "{python}" -m pip wheel -q --no-index --no-deps --no-build-isolation --wheel-dir "{root}/wheel" .
"""
OLD_SECONDS = 1_500_000_000
"""When the sources were last touched: long before the image is built, as in a checkout that is a day old."""
PACKAGES = ("checkpoint", "configuration", "finetune", "host", "serve", "tessera")


def instructions() -> list[tuple[str, str]]:
    """(keyword, rest) of the Dockerfile, continued lines joined."""
    text = re.sub(r"^#.*\n", "", (REPOSITORY / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in text.splitlines() if line.strip()]


def stage(name: str) -> list[tuple[str, str]]:
    """The instructions of one stage of the build."""
    found: list[tuple[str, str]] = []
    inside = False
    for keyword, rest in instructions():
        if keyword == "FROM":
            inside = rest.endswith(f" AS {name}")
        elif inside:
            found.append((keyword, rest))
    assert found, f"no stage {name}"
    return found


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where COPY and RUN of the sources' stages have been carried out: ``app``, and ``site``, the wheel unpacked."""
    root = tmp_path_factory.mktemp("image")
    app, tools = root / "app", root / "tools"
    for folder in (app, tools):
        folder.mkdir()
    (tools / "pip").write_text(PIP.format(python=sys.executable, root=root))
    (tools / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    for keyword, rest in (*stage("tools"), *stage("wheel")):
        if keyword == "COPY":
            *sources, target = rest.split()
            for source in sources:
                copy(REPOSITORY / source, app / target / source if target == "./" else app / target)
        elif keyword == "RUN" and "apt-get" not in rest and "-m venv" not in rest:
            environment = {"PATH": f"{tools}:{os.environ['PATH']}", "PIP_ARGS": "", "SOURCE_DATE_EPOCH": "315532800"}
            done = subprocess.run(
                ["sh", "-c", rest], cwd=app, env={**os.environ, **environment}, capture_output=True, text=True
            )
            assert done.returncode == 0, f"RUN {rest}\n{done.stdout}{done.stderr}"
    (wheel,) = (root / "wheel").glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(root / "site")
    return root


def copy(source: Path, target: Path) -> None:
    """A file or a folder as a build's context brings it: without caches, with the times it had."""
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    else:
        shutil.copy(source, target)
    for path in (target, *target.rglob("*")):
        os.utime(path, (OLD_SECONDS, OLD_SECONDS))


def test_the_image_gets_every_file_of_the_packages_as_it_is(built: Path) -> None:
    modules = {
        path.relative_to(REPOSITORY)
        for package in find_packages(str(REPOSITORY), include=[*PACKAGES, *(f"{name}.*" for name in PACKAGES)])
        for path in (REPOSITORY / package.replace(".", "/")).iterdir()
        if path.suffix in (".py", ".pyi", ".cpp", ".h")
    }
    assert {module.parts[0] for module in modules} == set(PACKAGES)
    differ = [str(m) for m in sorted(modules) if not is_same(REPOSITORY / m, built / "site" / m)]
    assert not differ, "in the image these are missing or other than the sources"


def is_same(one: Path, other: Path) -> bool:
    return other.is_file() and one.read_bytes() == other.read_bytes()


def test_what_git_passes_over_is_not_sent_to_a_build_either() -> None:
    """A benchmark alone leaves gigabytes in ``.cache``."""
    passed_over, sent = ((REPOSITORY / name).read_text().split() for name in (".gitignore", ".dockerignore"))
    assert {name.strip("/") for name in passed_over} <= {name.removeprefix("**/") for name in sent}
    copied = {source for keyword, rest in instructions() if keyword == "COPY" for source in rest.split()[:-1]}
    assert copied.isdisjoint(sent)


def test_the_image_installs_the_dependencies_of_the_package_and_no_others(built: Path) -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert (built / "app/serve.txt").read_text().split("\n")[:-1] == [*project["dependencies"], *extras["serve"]]
    assert ["tessera[serve]", *(built / "app/train.txt").read_text().split("\n")[:-1]] == extras["train"]


def test_what_serves_has_no_compiler_but_the_one_triton_needs() -> None:
    """The stages that images come from install nothing else: all is copied from those that do."""
    for name in ("runtime", "cpu", "cuda"):
        assert not any("pip install" in rest for _, rest in stage(name))
        installed = [re.findall(r"apt-get install -y --no-install-recommends ([^&]*)", rest) for _, rest in stage(name)]
        assert [word.split() for found in installed for word in found] == ([["gcc", "libc6-dev"]] if name == "cuda" else [])


def test_what_triton_compiles_lies_where_code_may_run_and_its_user_has_no_rights() -> None:
    cuda = stage("cuda")
    assert ("ENV", "TRITON_CACHE_DIR=/tmp/triton") in cuda
    assert [rest for keyword, rest in cuda if keyword == "USER"] == ["root", "10001:10001"]


def test_the_compose_file_has_a_folder_for_what_triton_compiles() -> None:
    service = yaml.safe_load((REPOSITORY / "deploy/docker-compose.yaml").read_text())["services"]["tessera"]
    assert (service["read_only"], service["tmpfs"]) == (True, ["/tmp:exec"])


def test_what_all_images_share_is_one_base() -> None:
    bases = {rest.split(" AS ")[0] for keyword, rest in instructions() if keyword == "FROM"}
    stages = {rest.split(" AS ")[1] for keyword, rest in instructions() if keyword == "FROM"}
    assert bases - stages == {"${BASE}"}
