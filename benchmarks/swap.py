"""For how long an exchange of weights keeps the steps of running streams waiting: ``python -m benchmarks.swap``.

A server of a GPT-NeoX of Pythia-160M's shape has 32 greedy streams; it is told again and again to serve the other of two
checkpoints. What an exchange takes is the server's own figure (``tessera_weight_swap_seconds``). The bar is the time to copy a
rank's weights in memory, measured in this process in the same run, and 50 ms. Afterwards transformers computes every stream
again, each token with the weights that the server says made it: it must be the likeliest, or as likely but for rounding.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
import torch
from transformers import AutoConfig, PreTrainedModel

from benchmarks.load_server import serving
from checkpoint import CheckpointWriter
from finetune.machine import inventory
from finetune.model.pretrained import new_model
from serve.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc

RESULTS: Final = Path(__file__).resolve().parent / "results"
STREAMS: Final = 32
TOKENS: Final = 400
"""Of each stream; when it has them it begins again with another prompt, while exchanges go on."""
GRACE_SECONDS: Final = 0.05
ROUNDING: Final = 1e-3
"""How far a token's logit may be below the largest: the order of sums differs."""


@dataclass(frozen=True, slots=True)
class Stream:
    """One stream that has ended."""

    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    made_by: tuple[tuple[int, int], ...]
    """First token and step of the checkpoint of each part."""


def model_of(step: int) -> PreTrainedModel:
    """The model whose weights the checkpoint of this step has."""
    config = AutoConfig.for_model(
        "gpt_neox", hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072, vocab_size=50_304,
        max_position_embeddings=2048, rotary_pct=0.25,
    )  # fmt: skip
    torch.manual_seed(step)
    return torch.nn.Module.eval(new_model(config, torch.float32))


def write_run(root: Path) -> int:
    """Both checkpoints; returns the bytes of one."""
    total = 0
    for step in (2, 1):
        model = model_of(step)
        with CheckpointWriter(root, step=step, config=model.config.to_dict()) as writer:
            for name, tensor in model.state_dict().items():
                writer.add(name, tensor)
        total = sum(tensor.nbytes for tensor in model.state_dict().values())
    return total


def copy_seconds(num_bytes: int) -> float:
    """Median seconds to copy so much memory with one thread, as each rank has it; into pages that are there."""
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.zeros(num_bytes, dtype=torch.uint8)
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


class Load:
    """Keeps a number of streams running until it is told to let them end."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._stub = inference_pb2_grpc.InferenceStub(channel)
        self._over = threading.Event()
        self._begun = threading.Semaphore(0)
        self.ended: list[Stream] = []
        self.failures: list[str] = []
        self._threads = [threading.Thread(target=self._keep_one, args=(number,)) for number in range(STREAMS)]

    def start(self) -> None:
        """Return when every stream has its first token."""
        for thread in self._threads:
            thread.start()
        for _ in self._threads:
            self._begun.acquire()

    def end(self) -> None:
        """Wait until the streams that run have ended."""
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _keep_one(self, number: int) -> None:
        begun = 0
        while not self._over.is_set():
            prompt = tuple((7919 * number + 104_729 * begun + place) % 50_000 for place in range(16))
            begun += 1
            try:
                self._stream(prompt, tell=begun == 1)
            except grpc.RpcError as error:
                self.failures.append(str(error))
                return

    def _stream(self, prompt: tuple[int, ...], *, tell: bool) -> None:
        request = inference_pb2.GenerateRequest()
        request.token_ids.ids.extend(prompt)
        request.stopping.max_new_tokens = TOKENS
        request.stopping.ignore_eos = True
        ids: list[int] = []
        for event in self._stub.GenerateStream(request):
            ids.extend(event.delta.token_ids)
            if ids and tell:
                self._begun.release()
                tell = False
            if event.HasField("finish"):
                made = tuple((part.first_token, part.checkpoint_step) for part in event.finish.made_by)
                self.ended.append(Stream(prompt, tuple(ids), made))


def exchange(root: Path, ranks: int, count: int) -> tuple[list[float], list[Stream], list[str]]:
    """Seconds of ``count`` exchanges under load, the streams, and what went wrong."""
    (root / "latest").write_text("step-00000001\n")
    with serving(root, ranks, "float32", ["--kv-cache-gib", "2"]) as served, grpc.insecure_channel(served.grpc) as channel:
        admin = admin_pb2_grpc.AdminStub(channel)
        load = Load(channel)
        load.start()
        seconds: list[float] = []
        before = waited(served.metrics)
        for number in range(count):
            (root / "latest").write_text(f"step-{2 - number % 2:08d}\n")
            admin.Reload(admin_pb2.ReloadRequest())
            after = waited(served.metrics)
            assert after[0] == before[0] + 1, "the weights were not exchanged between two steps"
            seconds.append(after[1] - before[1])
            before = after
        load.end()
    return seconds, load.ended, load.failures


def waited(metrics: str) -> tuple[int, float]:
    """How many exchanges there were, and the seconds that steps waited for them."""
    with urllib.request.urlopen(metrics) as answer:
        text = answer.read().decode()
    found = dict(re.findall(r"^tessera_weight_swap_seconds_(count|sum)(?:\{[^}]*\})? (\S+)", text, re.MULTILINE))
    return int(float(found["count"])), float(found["sum"])


def wrong_tokens(streams: Sequence[Stream], step: int, model: Any) -> int:
    """Of the tokens that the checkpoint of ``step`` is said to have made: how many it would not have made."""
    wrong = 0
    for stream in streams:
        begins = [first for first, _ in stream.made_by]
        parts = zip(stream.made_by, begins, [*begins[1:], len(stream.ids)], strict=True)
        ours = [place for (_, made), begin, end in parts if made == step for place in range(begin, end)]
        if not ours:
            continue
        with torch.inference_mode():
            logits = model(torch.tensor([stream.prompt + stream.ids])).logits[0, len(stream.prompt) - 1 : -1][ours]
        chosen = logits.gather(1, torch.tensor(stream.ids)[ours][:, None])[:, 0]
        wrong += int((logits.amax(dim=1) - chosen > ROUNDING).sum())
    return wrong


def main() -> int:
    """Run the benchmark, print it, and record it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--swaps", type=int, default=20, help="exchanges on each number of ranks (20)")
    parser.add_argument("--out", type=Path, help="result file; default: benchmarks/results/swap-cpu-<date>.json")
    options = parser.parse_args()
    out = options.out or RESULTS / f"swap-cpu-{datetime.datetime.now(datetime.UTC).date()}.json"
    rows: list[dict[str, Any]] = []
    record = {
        "what": f"milliseconds that {STREAMS} greedy streams waited for an exchange of weights; Pythia-160M's shape, float32",
        "hardware": f"{inventory.cpu_description()}, {inventory.usable_cores()} cores, {inventory.memory_bytes() >> 30} GiB",
        "versions": {name: inventory.version_of(name) for name in ("torch", "transformers", "deepspeed")},
        "rows": rows,
    }
    with tempfile.TemporaryDirectory() as scratch:
        num_bytes = write_run(Path(scratch))
        for ranks in (1, 2):
            copies = [copy_seconds(num_bytes // ranks)]
            seconds, streams, failures = exchange(Path(scratch), ranks, options.swaps)
            copies.append(copy_seconds(num_bytes // ranks))
            bar = statistics.mean(copies) + GRACE_SECONDS
            row = {
                "ranks": ranks,
                "swaps": len(seconds),
                "median_ms": 1e3 * statistics.median(seconds),
                "longest_ms": 1e3 * max(seconds),
                "copy_of_a_shard_ms": 1e3 * statistics.mean(copies),
                "bar_ms": 1e3 * bar,
                "within_bar": sum(each <= bar for each in seconds),
                "streams": len(streams),
                "streams_over_a_swap": sum(len(stream.made_by) > 1 for stream in streams),
                "streams_failed": len(failures),
                "tokens": sum(len(stream.ids) for stream in streams),
                "wrong_tokens": sum(wrong_tokens(streams, step, model_of(step)) for step in (1, 2)),
            }
            rows.append(row)
            print(json.dumps(row, indent=2), flush=True)
            out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
