"""What guessing tokens is worth at one sequence, and what it costs in vain: ``make bench-speculation``.

One server of Pythia-160M's shape, over gRPC. The same requests are decoded in turns with prompt lookup and, by
``speculative_tokens`` of the request, without. *Repeats*: greedy, of a prompt after which the model goes round in circles, as
edits of code and quotations do. *Never right*: draws from forty tokens that are all about as likely, whose pairs stand all over
the prompt: there is always something to look up, and it nearly never comes.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from benchmarks.peers import TesseraServer
from benchmarks.pretrained import without_progress_bars
from benchmarks.serving import RESULTS, machine, make_model
from serve.v1 import inference_pb2

GUESSED: Final = 16
PROMPT_TOKENS: Final = 256
NEW_TOKENS: Final = 192
_FEW: Final = 40
BARS: Final = {"repeats": 1.5, "never right": 0.97}
"""Tokens/s with guesses beside plain decoding: at least."""


class Server(TesseraServer):
    """A server whose requests say how many tokens are guessed."""

    def decode(self, request: inference_pb2.GenerateRequest, tokens: int) -> tuple[float, inference_pb2.Finish]:
        """Seconds from the first token to the last, and the end."""
        return self._loop.run_until_complete(self._decode(request, tokens))

    async def _decode(self, request: inference_pb2.GenerateRequest, tokens: int) -> tuple[float, inference_pb2.Finish]:
        request.stopping.max_new_tokens, request.stopping.ignore_eos = tokens, True
        first, count, finish = 0.0, 0, inference_pb2.Finish()
        async for event in self._stub.GenerateStream(request):
            if event.HasField("delta"):
                first = first or time.perf_counter()
                count += len(event.delta.token_ids)
            elif event.HasField("finish"):
                finish = event.finish
        assert count == tokens, f"{count} tokens came"
        return time.perf_counter() - first, finish


def request_of(case: str, seed: int) -> inference_pb2.GenerateRequest:
    """One request of a case."""
    source = random.Random(seed)
    few = source.sample(range(1000, 50_000), _FEW)
    request = inference_pb2.GenerateRequest()
    if case == "repeats":
        request.token_ids.ids.extend(few * (PROMPT_TOKENS // _FEW))
        request.sampling.temperature = 0.0
    else:
        request.token_ids.ids.extend(source.choices(few, k=PROMPT_TOKENS))
        request.sampling.temperature = 1.0
        request.sampling.seed = seed
        request.sampling.allowed_ids.extend(few)
    return request


def measure(dtype: str, turns: int) -> dict[str, dict[str, Any]]:
    """Tokens/s of each case with and without guesses; the ratio is the median of neighbouring turns'."""
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        server = Server(make_model(Path(scratch), dtype), dtype, "cpu", "--speculative-tokens", str(GUESSED))
        try:
            for case, bar in BARS.items():
                rates: dict[str, list[float]] = {"guessed": [], "plain": []}
                proposed = accepted = 0
                for turn in range(turns + 1):
                    for way in ("guessed", "plain") if turn % 2 else ("plain", "guessed"):
                        request = request_of(case, turn)
                        if way == "plain":
                            request.speculative_tokens = 0
                        seconds, finish = server.decode(request, NEW_TOKENS)
                        rates[way].append((NEW_TOKENS - 1) / seconds)
                        proposed += finish.proposed_tokens
                        accepted += finish.accepted_tokens
                ratios = [guessed / plain for guessed, plain in zip(rates["guessed"][1:], rates["plain"][1:], strict=True)]
                found[case] = {
                    "tokens/s, guessed": round(statistics.median(rates["guessed"][1:]), 1),
                    "tokens/s, plain": round(statistics.median(rates["plain"][1:]), 1),
                    "guessed / plain": round(statistics.median(ratios), 3),
                    "bar": bar,
                    "proposed": proposed,
                    "accepted": accepted,
                }
                print(case, json.dumps(found[case]), flush=True)
        finally:
            server.close()
    return found


def main() -> int:
    """Measure, print and record; 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description="What guessing tokens is worth at one sequence, over gRPC.")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--turns", type=int, default=12, help="of each way and case (12)")
    parser.add_argument("--no-record", action="store_true", help="write no result file")
    options = parser.parse_args()
    without_progress_bars()
    results = {dtype: measure(dtype, options.turns) for dtype in options.dtypes}
    record = {
        "what": f"prompt lookup of {GUESSED} tokens at most beside plain decoding, one sequence, Pythia-160M's shape, prompts "
        f"of {PROMPT_TOKENS} tokens and {NEW_TOKENS} new ones, over gRPC, in turns of one run; medians",
        "date": datetime.date.today().isoformat(),
        "machine": machine("cpu"),
        "results": results,
    }
    if not options.no_record:
        (RESULTS / f"speculation-cpu-{record['date']}.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return int(any(case["guessed / plain"] < case["bar"] for cases in results.values() for case in cases.values()))


if __name__ == "__main__":
    sys.exit(main())
