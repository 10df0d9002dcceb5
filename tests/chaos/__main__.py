"""``python -m tests.chaos [CASE ...]``: strike a server that serves, many times, and read the history of its calls afterwards.

A fault counts only if at least twenty streams were under way and well before it. At the end every call must have been answered,
exactly, once, or have ended as this case allows; counters must agree with the clients, and nothing may be left over.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import tempfile
import time
import traceback
from pathlib import Path

from finetune.machine.inventory import cpu_description
from tests.chaos import clients, clock, killed, limits, memory, moments, planted, ranks
from tests.chaos.case import Case, Field, Report
from tests.chaos.leftovers import Surroundings
from tests.chaos.mutant import MUTANTS
from tests.support import warm

CASES: dict[str, Case] = {
    **ranks.CASES,
    **moments.CASES,
    **killed.CASES,
    **memory.CASES,
    **limits.CASES,
    **clock.CASES,
    **clients.CASES,
    **planted.CASES,
}


_MOST_SECONDS = 720.0
"""For all cases, where nobody asks for more: after its part of it a case begins no further round."""


def run(name: str, field: Field, rounds: int | None) -> Report:
    """One case. What breaks it off is something that is not well."""
    case = CASES[name]
    report, began, surroundings = Report(case.fault), time.monotonic(), Surroundings()
    rounds = case.rounds if rounds is None else rounds
    report.figures["rounds"] = 0
    try:
        case.run(field, report, rounds)
    except Exception as error:
        traceback.print_exc()
        report.found.append(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    left = surroundings.left(field.kept)
    report.expect(not left, f"left over: {left}")
    report.figures["seconds"] = round(time.monotonic() - began, 1)
    return report


def _machine() -> dict[str, object]:
    load = ", ".join(f"{number:.0f}" for number in os.getloadavg())
    return {
        "device": f"{cpu_description()}, {len(os.sched_getaffinity(0))} cores",
        "python": platform.python_version(),
        "load when it ended": load,
    }


def main() -> int:
    """Run the cases; 0 if none of them found anything that is not well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; none: all")
    parser.add_argument(
        "--rounds",
        type=int,
        default=None,
        help="how often each; by default a few times, and fewer where a quarter of an hour is not enough for that",
    )
    parser.add_argument("--mutant", choices=MUTANTS, help="with the case sound: a server with this fault, which must be found")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="also write the results to this file")
    options = parser.parse_args()
    unknown = [name for name in options.cases if name not in CASES]
    if unknown:
        parser.error(f"unknown case {unknown[0]!r}; there are {', '.join(CASES)}")
    began, reports = time.monotonic(), {}
    with tempfile.TemporaryDirectory() as scratch:
        # What servers make in the folder for temporary files ends with the run.
        os.environ["TMPDIR"] = tempfile.tempdir = str(Path(scratch) / "tmp")
        Path(tempfile.tempdir).mkdir()
        field = Field(Path(scratch), options.seed)
        warm.can_fork(os.environ)  # what servers are forked from outlives every case
        if options.mutant:
            field = field.of(("tests.chaos.mutant", options.mutant))
        names = options.cases or list(CASES)
        for number, name in enumerate(names, 1):
            if options.rounds is None:  # what one leaves of its time the next ones have
                field.until = began + _MOST_SECONDS * number / len(names)
            reports[name] = run(name, field, options.rounds)
            print(f"{name}: {json.dumps(reports[name].to_json())}", flush=True)
        field.close()
    if options.out is not None:
        content = {
            "what": "a server of two ranks and a tiny model, struck under 32 streams: what became of every call",
            "date": datetime.date.today().isoformat(),
            "machine": _machine(),
            "seconds": round(time.monotonic() - began, 1),
            "cases": {name: report.to_json() for name, report in reports.items()},
        }
        options.out.write_text(json.dumps(content, indent=2) + "\n")
    bad = [name for name, report in reports.items() if report.found]
    if bad:
        for name in bad:
            print(f"not well: {name}: {'; '.join(reports[name].found)}", file=sys.stderr)
    for name in (name for name, report in reports.items() if report.not_run):
        print(f"not run: {name}: {reports[name].not_run}", file=sys.stderr)
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
