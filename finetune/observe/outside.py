"""What the launcher sees of a run from outside: memory while it lasts, the peaks beside the forecast, and the report."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from finetune.config import TuneConfig
from finetune.errors import RankDied
from finetune.machine.memory import MemoryWatch
from finetune.output.folder import CHECKPOINTS, RESUME
from finetune.output.records import FORECAST, MEASURED, beside, read_json, write_json
from finetune.units import in_gib


@contextmanager
def observed(config: TuneConfig, processes: Sequence[int], console: Console) -> Iterator[None]:
    """Watch the ranks while entered; however they end, keep what was seen, say it, and write ``report.html``.

    Raises:
        RankDied: as raised inside, with the memory that was seen.
    """
    output = Path(config.run.output)
    watch = MemoryWatch(processes)
    failure: BaseException | None = None
    try:
        with watch:
            yield
    except RankDied as error:
        failure = error
        if not error.told:  # memory has no part in a broken rule
            error.args = (f"{error}{_memory_seen(output, watch)}",)
        raise
    except BaseException as error:
        failure = error
        raise
    finally:
        _keep(output, watch)
        if failure is None:
            _say(output, console)
        if config.log.report and (failure is None or isinstance(failure, Exception)):
            _report(config, None if failure is None else str(failure), console)


def _memory_seen(output: Path, watch: MemoryWatch) -> str:
    """For a rank that was killed: what the ranks held, so that running out of memory can be told from other causes."""
    said = read_json(output / FORECAST)
    if said is None or not watch.peak_bytes:
        return ""
    room = in_gib(said["hardware"]["ram_bytes"])
    return f"; the ranks had held {in_gib(watch.peak_bytes)} GiB, the forecast was {in_gib(said['host_bytes'])} of {room} GiB"


def _keep(output: Path, watch: MemoryWatch) -> None:
    measured = {"host_bytes": watch.peak_bytes, "rank_bytes": watch.peaks, "disk_bytes": _disk_bytes(output)}
    device = read_json(output / "logs" / "device.json")
    if device is not None:
        measured["device_bytes"] = device["peak_bytes"]
        measured["device_reserved_bytes"] = device.get("reserved_bytes")
    with contextlib.suppress(OSError):  # a full disk has been told already
        write_json(output / MEASURED, measured)


def _disk_bytes(output: Path) -> int:
    """What the run's saves and data take."""
    folders = (output / name for name in (CHECKPOINTS, RESUME, "data"))
    return sum(file.stat().st_size for folder in folders for file in folder.rglob("*") if file.is_file())


def _say(output: Path, console: Console) -> None:
    line = beside(output)
    if line is not None:
        console.print(line, highlight=False, soft_wrap=True)


def _report(config: TuneConfig, failure: str | None, console: Console) -> None:
    from finetune.observe.report import write_report

    try:
        path = write_report(config, failure=failure)
    except Exception as error:  # a run that is done is not undone by its report
        console.print(
            f"[yellow]no report: {escape(f'{type(error).__name__}: {error}'[:300])}[/]", highlight=False, soft_wrap=True
        )
        return
    if path is not None:
        console.print(f"report:     {escape(str(path))}", highlight=False, soft_wrap=True)
