"""What becomes of a step whose loss or gradient is not finite."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from finetune.engines.base import EngineBase, Reduced
from finetune.engines.optimizer import EngineOptimizer
from finetune.errors import NotFinite


class Alone(EngineBase[EngineOptimizer]):
    """An engine of one rank, whose weights are updated ``early`` or not."""

    def __init__(self, *, early: bool) -> None:
        self.loss_scale, self._updates_early = None, early
        self.updates = 0
        self._optimizer = SimpleNamespace(skip_update=False, update=self._update)  # type: ignore[assignment]  # what is called of it

    def _update(self) -> bool:
        self.updates += not self._optimizer.skip_update
        return not self._optimizer.skip_update

    def _sum(self, *values: float) -> list[float]:
        return torch.tensor(values, dtype=torch.float64).tolist()


def reduced(*, loss: float = 2.0, bad_gradient: bool = False) -> Reduced:
    return Reduced(loss_sum=loss, bad_gradient=bad_gradient, squares=1.0, num_targets=4, stop=False)


@pytest.mark.parametrize(
    ("found", "skipped"), [(reduced(loss=math.nan), "loss"), (reduced(bad_gradient=True), "gradient"), (reduced(), None)]
)
def test_a_step_that_is_not_finite_changes_nothing_and_ends_the_run_where_weights_have_taken_it(
    found: Reduced, skipped: str | None
) -> None:
    engine = Alone(early=False)
    outcome = engine._end_step(found, None)
    assert (outcome.skipped, engine.updates) == (skipped, int(skipped is None))
    early = Alone(early=True)
    if skipped is None:
        assert early._end_step(found, None).skipped is None
        return
    with pytest.raises(NotFinite, match=rf"^the {skipped} was not a finite number \(layer 3\), and the weights had taken"):
        early._end_step(found, lambda why: "layer 3")
    assert early.updates == 0
