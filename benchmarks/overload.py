"""Three times as many calls as a server can answer: ``make bench-overload``.

What the server can do is measured first, by as many callers as keep its places full, each making one call after another. They
begin at different moments: calls that go on in step have their prompts computed together, which costs less than others do. Then
calls come at random moments at three times that rate, whatever becomes of those before. Goodput is tokens of calls that ended
well; the queue's length is read from the metrics all the while. On a machine of two cores callers wait for one that computes
before they can read what they are told; ``--apart`` leaves one to the rank, and the others to the server and its callers. Those
are busy with tokens of the small model alone, so take a larger one with it (``--hidden 384``).
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from benchmarks.guarded import Server, machine, make_model, serving
from benchmarks.open_loop import Load, Outcome, Running, percentile, spread

PLACES: Final = 16
QUEUE: Final = 32
WARM_SECONDS: Final = 5


class _Watch:
    """Reads the queue's length while it lasts."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self.longest = 0.0

    def _read(self) -> None:
        while not self._stop.wait(0.25):
            name = "tessera_num_requests_waiting"
            self.longest = max(self.longest, *(v for k, v in self._server.metrics().items() if k.partition("{")[0] == name))

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def tokens_a_second(outcome: Outcome, seconds: float, tokens: dict[int, int]) -> float:
    """Within the whole seconds that count."""
    whole = range(WARM_SECONDS, int(seconds))
    return sum(tokens.get(second, 0) for second in whole) / len(whole)


def _server_seconds(audit: Path) -> list[float]:
    """What the server's own book says of the calls that it refused."""
    lines = (json.loads(line) for line in audit.read_text().splitlines())
    return [line["seconds"] for line in lines if line["code"] == "RESOURCE_EXHAUSTED"]


def measure(
    scratch: Path, seconds: float, times: float, tokens: int, *, apart: bool = False, hidden: int = 192
) -> dict[str, Any]:
    """Both loads on one server, one after the other, what can be done before and after. ``apart``: see ``serving``."""
    audit = scratch / "audit.log"
    options = ("--max-num-seqs", str(PLACES), "--max-queued-requests", str(QUEUE), "--no-prefix-caching")
    with serving(make_model(scratch / "model", hidden=hidden), *options, "--audit-log", str(audit), apart=apart) as server:
        base = Load(address=server.address, seconds=WARM_SECONDS + min(30.0, seconds), prompt_tokens=32, new_tokens=tokens)
        full = replace(base, streams=PLACES + 8, apart_seconds=WARM_SECONDS - 1.0)
        before = tokens_a_second(first := Running(full).outcome(), full.seconds, first.tokens_by_second)
        flood = replace(base, seconds=WARM_SECONDS + seconds, rate=times * before / tokens, warm_seconds=WARM_SECONDS)
        with _Watch(server) as watch:
            outcome = Running(flood).outcome()
        after = tokens_a_second(last := Running(full).outcome(), full.seconds, last.tokens_by_second)
    most = (before + after) / 2
    goodput = tokens_a_second(outcome, flood.seconds, outcome.ended_well)
    # Whoever is taken waits for those before it, at most as many as the queue holds: they and itself at the rate of goodput.
    bound = (QUEUE + PLACES) * tokens / goodput
    return {
        "tokens a second that it can do": {"before": round(before, 1), "after": round(after, 1)},
        "features of the model": hidden, "the rank has a core of its own": apart,
        "calls a second": round(flood.rate, 1), "seconds": seconds, "ends": outcome.codes,
        "goodput, tokens a second": round(goodput, 1), "goodput / what it can do": round(goodput / most, 3),
        "longest queue": watch.longest, "limit of the queue": QUEUE,
        "ms to first token": spread(outcome.first_token), "ms that a full queue takes": round(1000 * bound),
        "ms to a refusal, client": spread(outcome.refused), "ms to a refusal, server": spread(_server_seconds(audit)),
        "refused within 10 ms, client": round(sum(s <= 0.01 for s in outcome.refused) / max(1, len(outcome.refused)), 4),
        "refusals without RetryInfo": outcome.without_retry_info, "client's lag, ms": round(1000 * outcome.lag, 1),
        "bars": {
            "goodput at least 0.9": goodput >= 0.9 * most,
            "queue within its limit": watch.longest <= QUEUE,
            "p99 to first token within what a full queue takes": percentile(outcome.first_token, 0.99) <= bound,
            "every refusal with RetryInfo": not outcome.without_retry_info,
            "99 of 100 refusals within 10 ms": percentile(outcome.refused, 0.99) <= 0.01,
        },
    }  # fmt: skip


def main() -> int:
    """Print and record; 0 if every bar is kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0, help="for which too many calls come (300)")
    parser.add_argument("--times", type=float, default=3.0, help="how many times what the server can do (3)")
    parser.add_argument("--tokens", type=int, default=192, help="that each call generates (192)")
    parser.add_argument("--apart", action="store_true", help="the rank has a core of its own")
    parser.add_argument("--hidden", type=int, default=192, help="features of the model (192)")
    parser.add_argument("--out", type=Path, help="result file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        load = options.seconds, options.times, options.tokens
        result = measure(Path(folder), *load, apart=options.apart, hidden=options.hidden)
    print(json.dumps(result, indent=1), flush=True)
    if options.out is not None:
        record = {"what": (__doc__ or "").split("\n")[0], "date": str(datetime.date.today()), "machine": machine()}
        options.out.write_text(json.dumps({**record, **result}, indent=2) + "\n")
    return int(not all(result["bars"].values()))


if __name__ == "__main__":
    sys.exit(main())
