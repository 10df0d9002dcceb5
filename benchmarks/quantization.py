"""What rounding costs in quality: ``make bench-quantization``.

A Llama of four layers is trained on Python's own standard library, every tenth file of which is held out. Then the ranks' own
code computes the perplexity of the held-out text (Jelinek et al. 1977) with plain weights, with each ``--quantization``, and
with ``--kv-cache-dtype int8``. Every way gets the same tokens, so that the ratios are far better known than the perplexities;
how well is told by the standard error over the rows. That the model learnt something is seen beside the perplexity of one that
knows only how often each token comes.

Eight minutes on two cores that have nothing else to do, most of them training.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import random
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from benchmarks.pretrained import without_progress_bars
from benchmarks.serving import RESULTS, machine
from serve.config import CacheConfig, ModelConfig, SchedulerConfig, ServerConfig
from serve.engine.plan import Span, Start, StepPlan
from serve.types import BlockId, SamplingParams, SequenceId
from serve.worker.loader import Stopwatch, load_rank
from serve.worker.parallel import Ranks
from serve.worker.runner import Runner

VOCABULARY: Final = 4096
CONTEXT: Final = 256
_ROWS: Final = 8
"""Samples of a training step."""
_BLOCK_TOKENS: Final = 16
_HELD_OUT: Final = 10
"""One file in so many."""


@dataclass(frozen=True)
class Way:
    """One way to serve the model."""

    quantization: Literal["none", "int8", "int4"] = "none"
    group: int = 32
    cache: Literal["auto", "int8"] = "auto"
    most: float | None = None
    """The bar: perplexity beside bf16's, less one; ``None`` where there is none."""


WAYS: Final = {
    "bf16": Way(),
    "int8": Way("int8", most=0.001),
    "int4, groups of 32": Way("int4", 32, most=0.03),
    "int4, groups of 64": Way("int4", 64),
    "int4, groups of 128": Way("int4", 128),
    "bf16, KV cache in int8": Way(cache="int8"),
    "int8, KV cache in int8": Way("int8", cache="int8"),
}


def texts() -> tuple[list[str], list[str]]:
    """Files to train on, and files that are held out; without the library's own tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"test", "tests", "idle_test", "site-packages", "lib2to3", "encodings", "__pycache__"}
    files = [file for file in sorted(root.rglob("*.py")) if not skipped & set(file.relative_to(root).parts)]
    read = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    return [text for i, text in enumerate(read) if i % _HELD_OUT], read[::_HELD_OUT]


def make_tokenizer(training: list[str]) -> Tokenizer:
    """Byte-level pairs (Sennrich et al. 2016) of the training text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<|end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(training, trainer)
    return tokenizer


def tokens_of(tokenizer: Tokenizer, given: list[str]) -> Tensor:
    """All texts one after the other, an end after each."""
    ids = [[*encoding.ids, 0] for encoding in tokenizer.encode_batch(given)]
    return torch.tensor([token for each in ids for token in each])


def train(tokens_N: Tensor, folder: Path, steps: int) -> float:
    """Train a model and save it in bf16; the last loss."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=64, intermediate_size=768,
        vocab_size=VOCABULARY, max_position_embeddings=CONTEXT, tie_word_embeddings=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def rate(step: int) -> float:
        return 2e-3 * min(1.0, (step + 1) / 40) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    draw, began, loss = random.Random(0), time.monotonic(), torch.tensor(math.nan)
    for step in range(steps):
        places = [draw.randrange(len(tokens_N) - CONTEXT - 1) for _ in range(_ROWS)]
        rows_NT = torch.stack([tokens_N[place : place + CONTEXT + 1] for place in places])
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(rows_NT[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), rows_NT[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 49:
            print(f"step {step + 1} of {steps}: loss {float(loss.detach()):.3f}, {time.monotonic() - began:.0f} s", flush=True)
    model.to(torch.bfloat16)  # type: ignore[arg-type]  # wrapped: mypy takes it for no method
    model.save_pretrained(folder)
    return float(loss.detach())


def losses(folder: Path, way: Way, rows: list[tuple[int, ...]]) -> tuple[str, Tensor]:
    """What computes linear layers, and the mean surprise of each held-out row in nats, by itself, by the code that serves."""
    config = ServerConfig(
        model=ModelConfig(
            path=str(folder), dtype="bfloat16", device="cpu", quantization=way.quantization, quantization_group=way.group
        ),
        cache=CacheConfig(kv_cache_gib=0.05, block_tokens=_BLOCK_TOKENS, kv_cache_dtype=way.cache),
        scheduler=SchedulerConfig(max_num_seqs=1),
    )
    model, ranks = load_rank(config, 0, torch.device("cpu"), lambda: Ranks(0, 1), Stopwatch())
    runner, means = Runner(model, ranks), []
    blocks = tuple(BlockId(block) for block in range(CONTEXT // _BLOCK_TOKENS))
    for step, row in enumerate(rows):
        start = Start(
            sequence=SequenceId(step), index=0, token_ids=row, num_prompt_tokens=len(row), sampling=SamplingParams(),
            prompt_logprobs=0,
        )  # fmt: skip
        span = Span(sequence=start.sequence, start=0, count=len(row), new_blocks=blocks)
        dropped = (SequenceId(step - 1),) if step else ()
        result = runner.execute(StepPlan(step=step, starts=(start,), spans=(span,), dropped=dropped))
        assert result is not None
        assert not result.faults
        told = [each.logprob for part in result.prompt_logprobs for each in part.logprobs]
        assert len(told) == len(row) - 1
        means.append(-sum(told) / len(told))
    return model.facts.linear, torch.tensor(means, dtype=torch.float64)


def by_frequency(training_N: Tensor, rows: list[tuple[int, ...]]) -> float:
    """Perplexity of the rows to who knows how often each token comes in the training text, and not what stands before it."""
    counts_V = torch.bincount(training_N, minlength=VOCABULARY).double() + 1.0
    surprise_V = -(counts_V / counts_V.sum()).log()
    return math.exp(float(surprise_V[torch.tensor(rows)[:, 1:]].mean()))


def compare(losses_R: Tensor, plain_R: Tensor) -> dict[str, float]:
    """Perplexity, and how much more it is than that of plain weights, in percent, with its standard error over the rows."""
    more_R = losses_R - plain_R
    error = float(more_R.std()) / math.sqrt(len(more_R)) if len(more_R) > 1 else math.nan
    return {
        "perplexity": round(math.exp(float(losses_R.mean())), 4),
        "more than bf16, percent": round(100 * math.expm1(float(more_R.mean())), 4),
        "standard error, percent": round(100 * error, 4),
    }


def record_of(found: dict[str, dict[str, Any]], notes: dict[str, object]) -> dict[str, object]:
    """What is written of a run: each way beside bf16, and the bars that it missed."""
    bars = {name: 100 * way.most for name, way in WAYS.items() if way.most is not None}
    return {
        **notes,
        "date": datetime.date.today().isoformat(),
        "machine": machine("cpu"),
        "python": platform.python_version(),
        "load average": [round(each, 1) for each in os.getloadavg()],
        "ways": found,
        "bars, percent": bars,
        "missed": [name for name, bar in bars.items() if found[name]["more than bf16, percent"] > bar],
    }


def main() -> int:
    """Train, measure, print and record; 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description="What rounding weights and the KV cache costs in perplexity.")
    parser.add_argument("--steps", type=int, default=800, help="of training (800)")
    parser.add_argument("--rows", type=int, default=320, help=f"of {CONTEXT} held-out tokens (320)")
    parser.add_argument("--keep", type=Path, help="a folder for the trained model, which is taken from there if it has one")
    parser.add_argument("--no-record", action="store_true", help="write no result file")
    options = parser.parse_args()
    without_progress_bars()
    torch.set_num_threads(os.cpu_count() or 1)
    began, worked = time.monotonic(), time.process_time()
    training, held_out = texts()
    tokenizer = make_tokenizer(training)
    tokens_N, training_N = tokens_of(tokenizer, held_out), tokens_of(tokenizer, training)
    rows = [tuple(row) for row in tokens_N[: len(tokens_N) // CONTEXT * CONTEXT].view(-1, CONTEXT).tolist()]
    rows = random.Random(1).sample(rows, min(options.rows, len(rows)))
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)
        if not (folder / "config.json").exists():
            train(training_N, folder, options.steps)
        with torch.inference_mode():
            told = {name: losses(folder, way, rows) for name, way in WAYS.items()}
    found: dict[str, dict[str, Any]] = {
        name: {"linear": linear, **compare(losses_R, told["bf16"][1])} for name, (linear, losses_R) in told.items()
    }
    for name, each in found.items():
        most = WAYS[name].most
        more, error = each["more than bf16, percent"], each["standard error, percent"]
        bar = "" if most is None else f", bar {100 * most:+.1f} %"
        print(
            f"{name:26} {each['linear']:12} {each['perplexity']:9.4f}  {more:+.3f} % (standard error {error:.3f}){bar}",
            flush=True,
        )
    record = record_of(found, {
        "what": f"perplexity of {len(rows)} x {CONTEXT} held-out tokens of Python's standard library, by a Llama of 4 layers "
        f"and 256 features that was trained on the rest of it for {options.steps} steps of {_ROWS} x {CONTEXT} tokens",
        "tokens of the training text": len(training_N),
        "perplexity by the frequency of tokens alone": round(by_frequency(training_N, rows), 2),
        "seconds": round(time.monotonic() - began),
        "seconds of processor time": round(time.process_time() - worked),
    })  # fmt: skip
    if not options.no_record:
        (RESULTS / f"quantization-cpu-{record['date']}.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return 1 if record["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
