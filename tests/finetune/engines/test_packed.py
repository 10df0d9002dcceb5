"""Rows of several samples under ZeRO-3: by a mask, by lengths and with another loss, the same is learned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.finetune.engines.packed_worker import STEPS, WAYS
from tests.finetune.engines.zero_worker import RANKS, SETTINGS
from tests.finetune.support import run_ranks


def test_every_way_of_keeping_samples_apart_learns_the_same(tmp_path: Path) -> None:
    run_ranks("tests.finetune.engines.packed_worker", RANKS, tmp_path)
    reports = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]
    assert reports[0] == reports[1]
    found, layers = reports[0], int(SETTINGS["num_hidden_layers"])
    masked = found["mask"]["losses"]
    for way in WAYS[:4]:
        assert found[way]["losses"] == pytest.approx(masked, rel=1e-5), way
    assert found["seen by all"]["losses"] != pytest.approx(masked, rel=1e-3), "these samples would notice one another"
    by_length, fused = ["packed samples are kept apart by their lengths, without a mask"], ["the loss is liger-kernel's"]
    assert [found[way]["said"] for way in WAYS] == [[], by_length, by_length, fused, []]
    passes = STEPS + 1  # one more to evaluate
    assert {way: (found[way]["varlen"], found[way]["liger"]) for way in WAYS} == {
        "mask": (0, 0),
        "varlen": (passes * layers, 0),
        "varlen, recomputed": ((passes + STEPS) * layers, 0),
        "fused": (0, passes),
        "seen by all": (0, 0),
    }
