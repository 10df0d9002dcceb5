"""One YAML fine-tunes an existing folder on chats with offload, and learns what a plain PyTorch loop learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from finetune.config import TuneConfig
from finetune.config.load import load_config
from finetune.data.batches import step_batches
from finetune.data.pack import SampleOrder, Share
from finetune.data.prepare import prepare
from finetune.data.rows import open_rows
from finetune.train.schedule import make_schedule
from tests.finetune.support import NEEDS_LIBAIO, ROOT, run_command, write_config
from tests.finetune.train.test_tune import losses_of
from tests.support.models import save

STEPS = 20
OFFLOADS: dict[str, dict[str, Any]] = {
    "cpu": {"optimizer": "cpu", "parameters": "cpu"},
    "nvme": {"optimizer": "nvme", "parameters": "nvme"},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-NeoX folder as transformers writes it; its matrices are large enough to be swapped to a disk."""
    folder = tmp_path_factory.mktemp("base")
    return save("gpt_neox", folder, hidden_size=192, intermediate_size=2048, num_hidden_layers=2, vocab_size=1536)


def configuration(base: Path, output: Path, offload: str) -> Path:
    disk = {"path": str(output.parent / "disk")} if offload == "nvme" else {}
    tree = {
        "model": {"path": str(base)},
        "data": {
            "train": [str(ROOT / "examples" / "cpu" / "chats.jsonl")],
            "chat_template": "plain",
            "seq_len": 128,
            "eval_fraction": 0,
        },
        "batch": {"micro": 2, "total": 8},
        "optimizer": {"lr": 3e-4},
        "schedule": {"steps": STEPS, "warmup": 5},
        "zero": {"stage": 3},
        "offload": {**OFFLOADS[offload], **disk},
        "log": {"every": 1},
        "run": {"output": str(output), "ranks": 2 if offload == "cpu" else 1, "device": "cpu", "precision": "fp32"},
    }
    return write_config(tree, output.parent / f"{offload}.yaml")


@pytest.fixture(scope="module")
def expected(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of every step, whichever way it is offloaded: the samples of a step are the same for all."""
    return plain_losses(load_config(configuration(base, tmp_path_factory.mktemp("plain") / "run", "cpu")), base)


def plain_losses(config: TuneConfig, base: Path) -> list[float]:
    """The same samples, each computed alone, by transformers' model and torch's AdamW."""
    prepared = prepare(config, lambda _: None)
    rows = open_rows(prepared, "train")
    order, share = SampleOrder(rows.num_samples, config.data.seed), Share(0, 1, config.step_samples, 1)
    schedule = make_schedule(config, rows.num_samples)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": config.optimizer.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=config.optimizer.eps)
    losses = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(step)
        (batch,) = step_batches(rows, order, share, step * config.step_samples)
        assert batch.segments is not None
        total = torch.zeros((), dtype=torch.float64)
        for inputs, targets, segments in zip(batch.inputs, batch.targets, batch.segments, strict=True):
            for segment in segments.unique():
                mine = segments == segment
                if not bool((targets[mine] != -100).any()):
                    continue
                logits = model(input_ids=inputs[mine][None], use_cache=False).logits[0]
                loss = nn.functional.cross_entropy(logits, targets[mine], ignore_index=-100, reduction="sum")
                (loss / batch.num_targets).backward()
                total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total) / batch.num_targets)
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("offload", ["cpu", pytest.param("nvme", marks=NEEDS_LIBAIO)])
def test_twenty_steps_on_chats_lose_what_plain_adamw_loses(
    base: Path, expected: list[float], tmp_path: Path, offload: str
) -> None:
    path = configuration(base, tmp_path / "run", offload)
    done = run_command("tune", path)
    assert done.returncode == 0, done.stderr
    if offload == "nvme":
        assert "on nvme" in done.stdout
    seen = losses_of(tmp_path / "run")
    assert list(seen) == list(range(1, STEPS + 1))
    assert list(seen.values()) == pytest.approx(expected, abs=1e-4)
    assert expected[-1] < 0.7 * expected[0]
    print(offload, max(abs(a - b) for a, b in zip(seen.values(), expected, strict=True)))
