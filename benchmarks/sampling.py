"""What choosing tokens costs: ``make bench-sampling``.

The sampler alone, 256 rows of 50,432 logits on two threads, beside the one that went row by row and sorted (kept under
``tests/`` as the reference) and beside ``argmax`` of the same tensor; and 64 streams over gRPC from a small model with a
vocabulary as large: tokens/s of each way of sampling beside greedy, in turns, while all streams decode.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import functools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from torch import Tensor

from benchmarks.peers import TesseraServer
from benchmarks.pretrained import without_progress_bars
from benchmarks.serving import RESULTS, machine
from finetune.model.pretrained import new_model
from serve.engine.plan import Start
from serve.model.kernels.build import load_cpu_kernels
from serve.types import SamplingParams, SequenceId
from serve.v1 import inference_pb2
from serve.worker.batch import SequenceState
from serve.worker.sampling.sampler import choose_sampling, sample
from tests.serve.worker import reference_sampler

ROWS: Final = 256
VOCABULARY: Final = 50_432
SEEN: Final = 4_000
"""Positions of a sequence that has penalties."""
TOP_P: Final[dict[str, Any]] = {"temperature": 1.0, "top_p": 0.9}
ALONE: Final[dict[str, tuple[float, dict[str, Any]]]] = {
    "greedy": (4.0, {}),
    "temperature, flat logits": (1.0, {"temperature": 1.0}),
    "top-p, flat logits": (1.0, TOP_P),
    "top-p, peaked logits": (4.0, TOP_P),
    "top-k 50 + top-p, peaked logits": (4.0, {**TOP_P, "top_k": 50}),
    "top-p + repetition penalty at 4,000 positions, flat logits": (1.0, {**TOP_P, "repetition_penalty": 1.1}),
    "top-p + repetition penalty at 4,000 positions, peaked logits": (4.0, {**TOP_P, "repetition_penalty": 1.1}),
}
"""Standard deviation of the logits, and what the requests ask for."""
PENALISED: Final = {
    f"top-p + repetition penalty at 4,000 positions, {logits}": f"top-p, {logits}"
    for logits in ("flat logits", "peaked logits")
}
"""Cases with a penalty, and the same without one."""
ALONE_BARS: Final[dict[str, tuple[str, Callable[[float], bool]]]] = {
    "greedy": ("ours / argmax", lambda ratio: ratio <= 1.2),
    "top-p, flat logits": ("reference / ours", lambda ratio: ratio >= 40),
    "top-p, peaked logits": ("reference / ours", lambda ratio: ratio >= 10),
    **dict.fromkeys(PENALISED, ("of without", lambda ratio: ratio <= 1.10)),
}
"""What each case's ratio has to be."""

STREAMS: Final = 64
STEP_TOKENS: Final = 2048
"""As ``TesseraServer`` is started."""
NEW_TOKENS: Final = 48
SERVED: Final[dict[str, tuple[int, dict[str, Any]]]] = {
    "greedy": (64, {"temperature": 0.0}),
    "top-p 0.9, flat logits": (64, TOP_P),
    "top-k 50 + top-p 0.9, peaked logits": (64, {"temperature": 0.02, "top_k": 50, "top_p": 0.9}),
    "greedy at 1,500 positions": (1_500, {"temperature": 0.0}),
    "both penalties at 1,500 positions": (1_500, {"temperature": 0.0, "repetition_penalty": 1.1, "frequency_penalty": 0.3}),
}
"""Tokens of the prompt, and what the requests ask for. The model's weights are random: its logits are flat at temperature 1."""
BARS: Final = {
    "top-p 0.9, flat logits": 0.5, "top-k 50 + top-p 0.9, peaked logits": 0.8, "both penalties at 1,500 positions": 0.9,
}  # fmt: skip
"""Tokens/s over gRPC beside greedy: at least."""


def alone(repeats: int) -> dict[str, dict[str, float]]:
    """Milliseconds of one call for all rows, by case: ours, the reference's, and ``argmax``; medians.

    Cases take turns, so that one is comparable with another; the reference, which takes seconds, has one turn that counts.
    """
    torch.set_num_threads(2)
    backend = choose_sampling(torch.device("cpu"), load_cpu_kernels())
    source = torch.Generator().manual_seed(0)
    noise = torch.randn(ROWS, VOCABULARY, generator=source)
    prompts = torch.randint(VOCABULARY, (ROWS, SEEN), generator=source).tolist()
    states: dict[str, list[SequenceState]] = {}
    for name, (_, params) in ALONE.items():
        states[name] = [
            _state(row, tuple(prompts[row]) if "repetition_penalty" in params else (1, 2), params) for row in range(ROWS)
        ]
        for state in states[name]:
            state.seen()  # as of a sequence that has been running
    seconds: dict[str, dict[str, list[float]]] = {name: {"ours": [], "reference": [], "argmax": []} for name in ALONE}
    for turn in range(repeats + 1):
        for name, (spread, _) in sorted(ALONE.items(), reverse=turn % 2 == 1):
            logits = noise * spread
            calls: dict[str, Callable[[Tensor], object]] = {
                "ours": functools.partial(sample, states=states[name], backend=backend),
                "argmax": lambda given: given.argmax(dim=1).tolist(),
            }
            if turn < 2:
                calls["reference"] = functools.partial(reference_sampler.sample, states=states[name])
            for who, call in calls.items():
                seconds[name][who].append(_timed(call, logits))
    found = {}
    for name, by in seconds.items():
        found[name] = {who: 1e3 * statistics.median(each[1:]) for who, each in by.items()}
        found[name]["reference / ours"] = found[name]["reference"] / found[name]["ours"]
        found[name]["ours / argmax"] = found[name]["ours"] / found[name]["argmax"]
        if name in PENALISED:
            ratios = [with_it / without for with_it, without in zip(by["ours"], seconds[PENALISED[name]]["ours"], strict=True)]
            found[name]["of without"] = statistics.median(ratios[1:])
        print(f"{name:62} " + "  ".join(f"{key} {value:.2f}" for key, value in found[name].items()), flush=True)
    return found


def _state(row: int, prompt: tuple[int, ...], params: dict[str, Any]) -> SequenceState:
    start = Start(
        sequence=SequenceId(row),
        index=0,
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        sampling=SamplingParams(seed=row, **params),
    )
    return SequenceState(start, list(prompt))


def _timed(call: Callable[[Tensor], object], logits: Tensor) -> float:
    given = logits.clone()
    began = time.perf_counter()
    call(given)
    return time.perf_counter() - began


class Server(TesseraServer):
    """A server of which it is known when each token came."""

    def rate(self, prompts: list[list[int]], tokens: int, sampling: inference_pb2.Sampling) -> float:
        """Tokens/s while all streams decode: from the last one's first token to the first one's last."""
        came = self._loop.run_until_complete(self._came(prompts, tokens, sampling))
        began, ended = max(times[0] for times in came), min(times[-1] for times in came)
        assert began < ended, "the first stream ended before the last began"
        return sum(began < each <= ended for times in came for each in times) / (ended - began)

    async def _came(self, prompts: list[list[int]], tokens: int, sampling: inference_pb2.Sampling) -> list[list[float]]:
        return await asyncio.gather(*(self._times(prompt, tokens, sampling) for prompt in prompts))

    async def _times(self, prompt: list[int], tokens: int, sampling: inference_pb2.Sampling) -> list[float]:
        request = inference_pb2.GenerateRequest(sampling=sampling)
        request.token_ids.ids.extend(prompt)
        request.stopping.max_new_tokens, request.stopping.ignore_eos = tokens, True
        return [time.perf_counter() async for event in self._stub.GenerateStream(request) for _ in event.delta.token_ids]


def served(repeats: int) -> dict[str, dict[str, float]]:
    """Decode tokens/s over gRPC of each way to sample, and the share of greedy's on prompts of the same length.

    The share is the median of the turns', in each of which all ways are measured one right after the other.
    """
    source = random.Random(0)
    turns: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as scratch:
        server = Server(small_model(Path(scratch)), "float32", "cpu")
        try:
            for turn in range(repeats + 1):
                rates = {}
                for name, (length, params) in sorted(SERVED.items(), reverse=turn % 2 == 1):
                    prompts = [[source.randrange(VOCABULARY) for _ in range(length)] for _ in range(STREAMS)]
                    # The first streams decode while the last ones' prompts are computed, a step's tokens at a time.
                    tokens = NEW_TOKENS + STREAMS * length // (STEP_TOKENS - STREAMS) + 2
                    rates[name] = server.rate(prompts, tokens, inference_pb2.Sampling(seed=7, **params))
                turns.append(rates)
        finally:
            server.close()
    plain = {length: name for name, (length, _) in SERVED.items() if name.startswith("greedy")}
    found: dict[str, dict[str, float]] = {}
    for name, (length, _) in SERVED.items():
        ratios = [rates[name] / rates[plain[length]] for rates in turns[1:]]
        rate = statistics.median(rates[name] for rates in turns[1:])
        found[name] = {"tokens/s": rate, "of greedy": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
        found[name] |= {"bar": BARS[name]} if name in BARS else {}
        print(f"{name:40} {rate:8.0f} tokens/s, {found[name]['of greedy']:.2f} of greedy", flush=True)
    return found


def small_model(folder: Path) -> Path:
    """A GPT-NeoX of four layers with random weights and a vocabulary of the size that is sampled from."""
    torch.manual_seed(0)
    config = transformers.GPTNeoXConfig(
        hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024, vocab_size=VOCABULARY,
        max_position_embeddings=2048,
    )  # fmt: skip
    new_model(config).save_pretrained(folder)
    return folder


def main() -> int:
    """Run, print and record; 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--repeats", type=int, default=5, help="of each cell over gRPC (5), and a quarter of those of the sampler alone"
    )
    parser.add_argument("--no-record", action="store_true", help="write no result file")
    parser.add_argument("--only-served", action="store_true", help="over gRPC alone; writes no result file")
    options = parser.parse_args()
    without_progress_bars()
    over_grpc = served(options.repeats)
    missed = [name for name, bar in BARS.items() if over_grpc[name]["of greedy"] < bar]
    if options.only_served:
        return int(bool(missed))
    by_case = alone(4 * options.repeats)
    missed += [name for name, (ratio, reached) in ALONE_BARS.items() if not reached(by_case[name][ratio])]
    record = {
        "what": f"the sampler: milliseconds for {ROWS} rows of {VOCABULARY} logits on two threads, and tokens/s of {STREAMS} "
        "streams over gRPC beside greedy; medians",
        "date": datetime.date.today().isoformat(),
        "machine": machine("cpu"),
        "alone_ms": by_case,
        "over_grpc": over_grpc,
        "missed": missed,
    }
    if not options.no_record:
        (RESULTS / f"sampling-cpu-{record['date']}.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
