"""Lines of the log: one shape for the server and its ranks, as text or JSON, in a file that may be moved away."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve import logs
from serve.worker.rank_output import RankOutput
from tests.repo.documents import REPOSITORY

PATIENCE_SECONDS = 120.0

RANK = """
import logging, os, sys
from serve import logs
logs.set_up_for_server("INFO")
log = logging.getLogger("serve.worker.trial")
log.debug("not asked for")
log.info("one\\nof two lines", extra={"request_id": "r1"})
try:
    1 / 0
except ZeroDivisionError:
    log.exception("broke")
print("printed", flush=True)
os.write(2, b"\\xff raw and without an end")
"""


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger, as it was before at the end."""
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield root
    for handler in set(root.handlers) - set(before[0]):
        handler.close()
    root.handlers, root.level = before


def test_what_a_rank_logs_prints_and_leaves_is_in_the_servers_log_with_its_number(root: logging.Logger, tmp_path: Path) -> None:
    logs.set_up("error", form="json", file=str(tmp_path / "log"))
    output = RankOutput("serve.rank", 3)
    subprocess.run([sys.executable, "-c", RANK], stdout=output.writes, stderr=output.writes, cwd=REPOSITORY, check=True)
    output.handed_over()
    output._thread.join(PATIENCE_SECONDS)  # ``wait`` would go on soon without it
    told, broke, printed, raw = (json.loads(line) for line in (tmp_path / "log").read_text().splitlines())
    assert (told["message"], told["level"], told["rank"], told["request_id"]) == ("one\nof two lines", "INFO", 3, "r1")
    assert (broke["message"], broke["logger"]) == ("broke", "serve.worker.trial")
    assert broke["traceback"].endswith("ZeroDivisionError: division by zero")
    assert (printed["message"], printed["logger"], printed["rank"]) == ("printed", "serve.rank", 3)
    assert raw["message"] == "\\xff raw and without an end"
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"]) for line in (told, broke, printed, raw))


def test_lines_of_text_have_the_same_parts(root: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    logs.set_up("info")
    logging.getLogger("serve.app").info("of the server")
    logs.say("of a rank", source="serve.rank", rank=1)
    logs.say(logs.MARK + "{cut off", source="serve.rank", rank=1)
    own, ranks, cut = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"\S+Z INFO    serve\.app: of the server", own)
    assert re.fullmatch(r"\S+Z WARNING rank 1 serve\.rank: of a rank", ranks)
    assert cut.endswith("{cut off")


def test_a_file_that_was_moved_away_is_made_anew_and_one_that_cannot_be_is_told_once(
    root: logging.Logger, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    logs.set_up("info", file=str(folder / "log"))
    log = logging.getLogger("serve.app")
    log.info("first")
    (folder / "log").rename(folder / "log.1")
    log.info("second")
    assert [(folder / name).read_text().split()[-1] for name in ("log.1", "log")] == ["first", "second"]
    folder.rename(tmp_path / "moved")
    log.info("lost")
    log.info("lost")
    folder.mkdir()
    log.info("third")
    assert (folder / "log").read_text().split()[-1] == "third"
    told = capsys.readouterr().err
    assert (told.count("cannot be written"), told.count("is written again")) == (1, 1)


def test_a_log_file_that_cannot_be_written_is_a_usage_error() -> None:
    command = [sys.executable, "-m", "serve", "--model", "/nowhere", "--log-file", "/nowhere/log"]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=400)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "tessera-serve: --log-file is '/nowhere/log'; it cannot be written: No such file or directory\n"
