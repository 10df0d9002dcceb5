"""The wheel: the same bytes from the same sources, whole, small for those who only call, and enough to serve with."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.repo.documents import REPOSITORY
from tests.support import models, reference

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(900)]

PARTS = ("checkpoint", "configuration", "finetune", "host", "serve", "tessera", "protos")
CLIENT_MEGABYTES = 60
SECONDS = 600
PROMPT = (5, 6, 7, 8)
ASK = """
import sys
from tessera import Client, Finish
with Client(sys.argv[1]) as client:
    stream = client.stream([5, 6, 7, 8], max_new_tokens=8, temperature=0.0, ignore_eos=True)
    print(*[token for event in stream if not isinstance(event, Finish) for token in getattr(event, "token_ids", ())])
"""


def run(*words: str | Path, folder: Path, **environment: str) -> str:
    """What a program prints; it must end with 0."""
    done = subprocess.run(
        [*map(str, words)], cwd=folder, env={**clean(), **environment}, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, f"{' '.join(map(str, words))}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout


def clean() -> dict[str, str]:
    """Our variables without those that let another Python find the modules of this one."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV", "TESSERA"))}


def build(folder: Path, mask: int, seconds: int) -> Path:
    """The wheel of a copy of the sources, made with a file mask, touched at a time."""
    sources = folder / "sources"
    sources.mkdir(parents=True)
    for part in PARTS:
        shutil.copytree(REPOSITORY / part, sources / part, ignore=shutil.ignore_patterns("__pycache__", "ahead"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, sources)
    for path in sources.rglob("*"):
        path.chmod(0o755 & ~mask if path.is_dir() else 0o644 & ~mask)
        os.utime(path, (seconds, seconds))
    pip = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--wheel-dir", folder)
    run(*pip, sources, folder=folder, SOURCE_DATE_EPOCH="1750000000")
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("one"), 0, 1_600_000_000)


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """An empty virtual environment, which has not even pip."""
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", folder=tmp_path)
    return tmp_path / "venv"


def install(environment: Path, what: str) -> Path:
    """Install into an environment from outside; where its packages lie."""
    pip = (sys.executable, "-m", "pip", "--python", environment / "bin/python", "install", "-q")
    run(*pip, "-c", REPOSITORY / "constraints.txt", what, folder=environment, PIP_DISABLE_PIP_VERSION_CHECK="1")
    (packages,) = environment.glob("lib/python3.*/site-packages")
    return packages


def test_two_builds_of_the_same_sources_are_equal_bytes(wheel: Path, tmp_path: Path) -> None:
    assert build(tmp_path / "another place", 0o022, 1_700_000_000).read_bytes() == wheel.read_bytes()


def test_the_wheel_has_every_file_that_the_packages_need_and_no_other(wheel: Path) -> None:
    suffixes = {".py", ".pyi", ".cpp", ".h", ".jinja", ".typed"}
    wanted = {
        str(path.relative_to(REPOSITORY))
        for part in PARTS[:-1]
        for path in (REPOSITORY / part).rglob("*")
        if path.is_file() and (path.suffix in suffixes or path.name == "py.typed") and "ahead" not in path.parts
    }
    with zipfile.ZipFile(wheel) as file:
        names = [name for name in file.namelist() if ".dist-info/" not in name]
    data = {name for name in names if ".data/" in name}
    assert set(names) - data == wanted
    assert {Path(name).name for name in data} == {path.name for path in (REPOSITORY / "protos/serve/v1").glob("*.proto")}
    assert wheel.name.endswith("-py3-none-any.whl")


def test_the_client_extra_is_small_and_asks_a_server(environment: Path, wheel: Path, server_address: str) -> None:
    packages = install(environment, f"{wheel}[client]")
    size = sum(path.stat().st_size for path in packages.rglob("*") if path.is_file()) / 1e6
    print(f"client extra: {size:.1f} MB")
    assert size <= CLIENT_MEGABYTES, sorted((path.name, path.stat().st_size) for path in packages.iterdir())
    tokens = run(environment / "bin/python", "-P", "-c", ASK, server_address, folder=environment).split()
    assert len(tokens) == 8
    assert run(environment / "bin/tessera-health", "--address", server_address, folder=environment) == "SERVING\n"
    told = subprocess.run([environment / "bin/tessera-serve", "--help"], env=clean(), capture_output=True, text=True)
    assert (told.returncode, "pip install 'tessera[serve]' brings it" in told.stderr) == (1, True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.save("gpt_neox", tmp_path_factory.mktemp("model") / "gpt_neox")


@pytest.fixture(scope="module")
def server_address(model: Path) -> Iterator[str]:
    process = start(sys.executable, "-m", "serve", model=model)
    try:
        yield address_of(process)
    finally:
        end(process)


def start(*words: str | Path, model: Path) -> subprocess.Popen[str]:
    options = ("--model", model, "--port", "0", "--metrics-port", "0", "--kv-cache-gib", "0.05")
    return subprocess.Popen([*map(str, (*words, *options))], cwd="/", env=clean(), stdout=subprocess.PIPE, text=True)


def address_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("tessera ready "), line
    return dict(word.split("=", 1) for word in line.split()[2:])["grpc"]


def end(process: subprocess.Popen[str]) -> int:
    process.send_signal(signal.SIGTERM)
    try:
        return process.wait(120)
    finally:
        process.kill()
        assert process.stdout is not None
        process.stdout.close()


def test_from_the_wheel_in_a_clean_environment_it_starts_streams_drains_and_ends_well(
    environment: Path, wheel: Path, model: Path
) -> None:
    began = time.monotonic()
    install(environment, f"{wheel}[serve]")
    print(f"serve extra installed in {time.monotonic() - began:.0f} s")
    process = start(environment / "bin/tessera-serve", model=model)
    try:
        tokens = run(environment / "bin/python", "-P", "-c", ASK, address_of(process), folder=environment).split()
    finally:
        code = end(process)
    assert code == 0
    assert [*map(int, tokens)] == reference.greedy(reference.load(model), PROMPT, 8)
