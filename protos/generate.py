"""Generate ``serve/v1`` from ``protos/serve/v1``, or prove that it is fresh.

``python protos/generate.py`` writes the modules and their type stubs; ``python protos/generate.py --check`` writes them to a
temporary folder, compares, and exits 1 with the names of those that differ. The output depends on the version of grpcio-tools:
use the one in ``constraints.txt``.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

PROTOS = Path(__file__).resolve().parent
REPOSITORY = PROTOS.parent
PACKAGE = Path("serve") / "v1"


def generate(root: Path) -> list[Path]:
    """Write the modules below ``root`` and return their paths relative to it, sorted.

    Raises:
        SystemExit: protoc refuses a file; its own messages are on stderr.
    """
    sources = sorted((PROTOS / PACKAGE).glob("*.proto"))
    # Which services exist decides which *_pb2_grpc modules are worth having.
    with_service = [source for source in sources if "\nservice " in source.read_text()]
    common = ["protoc", f"--proto_path={PROTOS}", f"--proto_path={files('grpc_tools') / '_proto'}"]
    _run([*common, f"--python_out={root}", f"--pyi_out={root}", *map(str, sources)])
    _run([*common, f"--grpc_python_out={root}", *map(str, with_service)])
    return sorted(path.relative_to(root) for path in (root / PACKAGE).glob("*_pb2*.py*") if path.suffix in (".py", ".pyi"))


def _run(arguments: list[str]) -> None:
    code = protoc.main(arguments)
    if code != 0:
        raise SystemExit(f"protoc failed with code {code}")


def differing(fresh_root: Path, fresh: list[Path]) -> list[Path]:
    """Modules that are missing, stale or left over in the repository."""
    committed = {path.relative_to(REPOSITORY) for path in (REPOSITORY / PACKAGE).glob("*_pb2*.py*")}
    stale = [path for path in fresh if path in committed and _differs(fresh_root / path, REPOSITORY / path)]
    return sorted({*stale, *(set(fresh) ^ committed)})


def _differs(one: Path, other: Path) -> bool:
    return one.read_bytes() != other.read_bytes()


def main() -> int:
    parser = argparse.ArgumentParser(description="Generate serve/v1 from protos/serve/v1.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if serve/v1 is not fresh")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        fresh = generate(root)
        wrong = differing(root, fresh)
        if check:
            for path in wrong:
                print(f"{path} is not what protos/ gives; run `make proto`", file=sys.stderr)
            return 1 if wrong else 0
        for path in wrong:
            if path in fresh:
                shutil.copyfile(root / path, REPOSITORY / path)
            else:
                (REPOSITORY / path).unlink()
            print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
