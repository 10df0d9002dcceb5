"""Seconds from the command to ready of a small model: ``python -m benchmarks.start``; two minutes on a quiet machine.

Caches are warm, those of Python's modules too: the first start is left out. With ``--beside PATH`` another checkout of Tessera
takes turns, for a machine that is not always as fast. Beside the clock stands the computing of all the server's processes up to
then, which says what a start costs where other work shares the cores.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import psutil

from benchmarks.peers import ROOT
from benchmarks.pretrained import without_progress_bars
from benchmarks.sampling import small_model
from benchmarks.serving import RESULTS, machine

BAR: Final = 2.5
"""Seconds, of the median start."""


def start(model: Path, root: Path = ROOT) -> tuple[float, float]:
    """Seconds to the line that says ready, and seconds of computing of all processes of the server by then.

    Args:
        root: of the checkout whose server it is.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-m", "serve", "--model", str(model), "--dtype", "float32", "--device", "cpu", "--port", "0"]
    began = time.perf_counter()
    with subprocess.Popen(
        [*command, "--metrics-port", "0", "--kv-cache-gib", "0.2"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=root,
        env=environment | {"PYTHONPATH": str(root)},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        line = process.stdout.readline()
        seconds = time.perf_counter() - began
        assert line.startswith("tessera ready "), f"the server did not start: {line!r}"
        server = psutil.Process(process.pid)
        computed = sum(sum(each.cpu_times()[:4]) for each in (server, *server.children(recursive=True)))
        process.terminate()
        process.wait(60)
    return seconds, computed


def main() -> int:
    """Start again and again, print and record; 1 where the bar is missed."""
    parser = argparse.ArgumentParser(description="Seconds from the command to ready, of a small model.")
    parser.add_argument("--starts", type=int, default=15, help="after the one that warms the caches (15)")
    parser.add_argument("--beside", type=Path, help="another checkout, which takes turns")
    parser.add_argument("--no-record", action="store_true", help="write no result file")
    options = parser.parse_args()
    without_progress_bars()
    roots = [ROOT] if options.beside is None else [ROOT, options.beside.resolve()]
    with tempfile.TemporaryDirectory() as scratch:
        model = small_model(Path(scratch))
        turns = [[start(model, root) for root in roots] for _ in range(options.starts + 1)][1:]
    clock, computed = zip(*(turn[0] for turn in turns), strict=True)
    record = {
        "what": "seconds from the command to ready, of a GPT-NeoX of 4 layers and 256 features; warm caches, medians",
        "date": datetime.date.today().isoformat(),
        "machine": machine("cpu"),
        "load average": [round(load, 1) for load in os.getloadavg()],
        "starts": len(turns),
        "seconds": round(statistics.median(clock), 2),
        "least and most": [round(min(clock), 2), round(max(clock), 2)],
        "seconds of computing": round(statistics.median(computed), 2),
        "bar": BAR,
    }
    if options.beside is not None:
        seconds, computed = zip(*(turn[1] for turn in turns), strict=True)
        record["beside"] = {
            "checkout": options.beside.name,
            "seconds": round(statistics.median(seconds), 2),
            "least and most": [round(min(seconds), 2), round(max(seconds), 2)],
            "seconds of computing": round(statistics.median(computed), 2),
            "times as long here": round(statistics.median(here[0] / there[0] for here, there in turns), 2),
        }
    print(json.dumps(record, indent=2))
    if not options.no_record:
        (RESULTS / f"start-cpu-{record['date']}.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return int(statistics.median(clock) > BAR)


if __name__ == "__main__":
    sys.exit(main())
