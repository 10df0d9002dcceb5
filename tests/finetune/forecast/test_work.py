"""What a micro-batch computes, counted as torch's kernels compute it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from finetune.config import DataConfig, TuneConfig
from finetune.forecast.estimate import model_config_of
from finetune.forecast.facts import facts_of
from finetune.forecast.probe import _Counted
from finetune.forecast.work import Tally
from tests.finetune.forecast.support import config_of


def attention_of(config: TuneConfig) -> float:
    work = facts_of(config, model_config_of(config), "fp32", on_gpu=False).work
    return sum(sum(by_keys.values()) for by_keys in work.attention.values())


@pytest.mark.parametrize(
    ("length", "share"), [(96, 1.0), (512, 1.0), (640, (512 * 512 + 128 * 640) / 640**2), (1024, 0.75), (1536, 2 / 3)]
)
def test_causal_attention_computes_every_block_of_keys_that_its_triangle_touches(length: int, share: float) -> None:
    """As long as a mask's whole square, up to a block: their speeds were measured equal only so."""
    shape = (2, 3, length, 8)
    query, key, value = (torch.zeros(shape, requires_grad=True) for _ in range(3))
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    counted = []
    for how in ({"is_causal": True}, {"attn_mask": mask}):
        with _Counted() as seen:
            answer = torch.nn.functional.scaled_dot_product_attention(query, key, value, **how)
            torch.autograd.grad(answer.sum(), (query, key, value))
        counted.append(seen.tally.work(tensors=0).attention[8][length])
    whole = 3.5 * 4 * 2 * 3 * length**2 * 8
    assert counted == pytest.approx([whole * share, whole])


def test_samples_that_are_packed_apart_are_counted_by_the_squares_of_their_masks(tmp_path: Path) -> None:
    joined, apart = (
        attention_of(dataclasses.replace(config_of(tmp_path), data=data))
        for data in (DataConfig(train=("x",), seq_len=1024, packing=packing) for packing in ("join", "isolate"))  # type: ignore[arg-type]
    )
    assert joined == pytest.approx(0.75 * apart)


@pytest.mark.parametrize("width", [2, 4])
def test_a_heads_gradient_is_read_and_written_once_for_every_chunk_of_rows(width: int) -> None:
    """In 16 bits too, where the products that are added to it stay in the cache."""
    rows, hidden, vocab = 64, 32, 1000

    def moved(chunk: int, *, trained: bool) -> float:
        tally = Tally()
        tally.head(rows, chunk, hidden, vocab, trained=trained, width=width)
        return tally.work(tensors=0).plain_bytes

    for chunk in (16, 64):
        assert moved(chunk, trained=True) - moved(chunk, trained=False) == 2 * 4 * vocab * hidden * (rows // chunk)
