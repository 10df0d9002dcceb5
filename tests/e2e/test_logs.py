"""The log of a real server, its own lines and its ranks' in one file."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from tests.support.server import serving, until


def entries(file: Path) -> list[dict[str, object]]:
    """The whole lines: the last one may be being written."""
    return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def test_a_server_and_its_ranks_write_one_rotated_file_of_json(folder: Path, tmp_path: Path) -> None:
    log, old = tmp_path / "log", tmp_path / "log.1"
    with serving(folder, "--log-format", "json", "--log-file", str(log)) as server:
        assert "".join(server.log) == ""
        log.rename(old)
        os.kill(server.rank_pids()[0], signal.SIGUSR1)  # has it print where its threads are
        until(lambda: log.exists() and any("most recent call first" in str(entry["message"]) for entry in entries(log)))
        os.kill(server.rank_pids()[0], signal.SIGKILL)
        until(lambda: any("engine down" in str(entry["message"]) for entry in entries(log)))
    assert any(str(entry["message"]).startswith("rank 0 started: process") for entry in entries(old))
    assert {entry["rank"] for entry in entries(log) if entry["logger"] == "serve.rank"} == {0}
