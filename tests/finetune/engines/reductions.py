"""What ZeRO-1 and ZeRO-2 do with buckets of gradients in a step, watched in DeepSpeed's optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from finetune.data.batches import Microbatch
from finetune.engines.zero.engine import ZeroEngine


def reductions(make_engine: Callable[[], ZeroEngine], batches: list[Microbatch]) -> dict[str, Sequence[int]]:
    """How many tensors the all-reduces of one step were of: as DeepSpeed cut the buckets, and as they were made.

    And for each bucket that was made, whether all gradients were there.
    """
    cut: list[int] = []
    made: list[int] = []
    buckets: list[bool] = []
    reduce, make = DeepSpeedZeroOptimizer.allreduce_bucket, DeepSpeedZeroOptimizer.setup_buckets

    def making(self: Any) -> None:
        if not self.ready_for_gradients:
            buckets.append(all(parameter.grad is not None for group in self.bit16_groups for parameter in group))
        make(self)

    with (
        patch.object(
            DeepSpeedZeroOptimizer,
            "allreduce_bucket",
            lambda self, bucket, *args, **words: made.append(len(bucket)) or reduce(self, bucket, *args, **words),
        ),
        patch.object(DeepSpeedZeroOptimizer, "setup_buckets", making),
    ):
        engine = make_engine()
        zero_engine: Any = engine._engine
        in_place = zero_engine.optimizer.allreduce_bucket
        zero_engine.optimizer.allreduce_bucket = lambda bucket, *args, **words: (
            cut.append(len(bucket)) or in_place(bucket, *args, **words)
        )
        engine.train_step(batches, 1e-3)
    return {"cut": cut, "made": made, "buckets": buckets}
