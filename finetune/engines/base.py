"""What both engines are: one of the ranks that train together, and what all of them agree on."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
import torch.distributed as dist

from finetune.distributed import random_state, set_random_state
from finetune.engines.loss_scale import LossScale, is_everyday, reason_of_bad_gradient
from finetune.engines.optimizer import EngineOptimizer
from finetune.engines.protocol import StepOutcome
from finetune.errors import NotFinite


class _Engine(Protocol):
    """What is asked of DeepSpeed's engines here, of either kind."""

    def destroy(self) -> None: ...


Updated = TypeVar("Updated", bound=EngineOptimizer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    """What one rank knows of a step once gradients are reduced."""

    loss_sum: float
    """Over this rank's target tokens."""
    bad_gradient: bool
    """Whether its part of the gradient is not finite."""
    squares: float = 0.0
    """Its share of the gradient's squared norm, if the engine clips by that."""
    num_targets: int
    """Targets of the step, of all ranks together."""
    stop: bool
    """Whether it would stop."""


class EngineBase(Generic[Updated]):
    """One of the ranks that train together. Every method is collective: all ranks call it, in the same order."""

    loss_scale: LossScale | None
    """In fp16."""
    _optimizer: Updated
    _updates_early = False
    """Whether weights take a step's gradients before all ranks know that they are finite."""

    def __init__(self, device: torch.device) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.device = device

    def agree(self, good: bool) -> bool:
        """Whether ``good`` is true on every rank."""
        return self._sum(float(not good))[0] == 0

    def rng_states(self) -> list[torch.Tensor]:
        """The random state of every rank's device, uint8, by rank."""
        mine = random_state(self.device).to(self.device)
        everyone = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(everyone, mine)
        return [state.cpu() for state in everyone]

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Replace the state of the generator of this rank's device: uint8, as ``rng_states`` gave it for the rank."""
        set_random_state(self.device, state)

    def _end_step(self, found: Reduced, diagnose: Callable[[str], str | None] | None) -> StepOutcome:
        """Decide on all ranks together whether a step counts, and update.

        Args:
            diagnose: finds, in words, where what is not finite came from; told why the step is skipped.

        Raises:
            NotFinite: the step must not count, and counts already.
        """
        bad_loss = not math.isfinite(found.loss_sum)
        loss_sum, squares, losses, gradients, stops = self._sum(
            0.0 if bad_loss else found.loss_sum,
            0.0 if found.bad_gradient else found.squares,
            float(bad_loss),
            float(found.bad_gradient),
            float(found.stop),
        )
        skipped = "loss" if losses else reason_of_bad_gradient(self.loss_scale) if gradients else None
        norm, diagnosis = math.sqrt(squares), None
        if skipped is None:
            self._before_update(norm)
        elif diagnose is not None and not is_everyday(skipped, self.loss_scale):
            diagnosis = diagnose(skipped)
        if skipped is not None and self._updates_early:
            where = f" ({diagnosis})" if diagnosis else ""
            raise NotFinite(
                f"the {skipped} was not a finite number{where}, and the weights had taken this step's gradients already, as "
                "they do with offload.method superoffload and optimizer.clip 0: go on from the newest checkpoint with a larger "
                "optimizer.clip, where such a step changes nothing"
            )
        self._optimizer.skip_update = skipped is not None
        updated = self._optimizer.update()
        if updated:
            self._after_update()
        elif skipped is None:
            skipped = reason_of_bad_gradient(self.loss_scale)
            diagnosis = "the norm: every number is finite, the sum of their squares is not"
        if self.loss_scale is not None and skipped != "loss":
            self.loss_scale.stepped(overflowed=skipped is not None)
        mean = float("nan") if losses else loss_sum / max(1, found.num_targets)
        norm = float("nan") if skipped else self._norm(norm)
        return StepOutcome(mean, norm, found.num_targets, skipped, stops > 0, diagnosis)

    def _before_update(self, norm: float) -> None:
        """What is done with good gradients of all ranks, whose norm is ``norm``, before the update."""

    def _after_update(self) -> None:
        """What is done with new weights."""

    def _norm(self, found: float) -> float:
        """The gradient's norm before clipping, after an update; ``found`` is the root of all ranks' ``squares``."""
        return found

    def _sum(self, *values: float) -> list[float]:
        """Each value added up over all ranks, in fp64."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return [float(value) for value in tensor]

    def _leave(self, engine: _Engine) -> None:
        """Free DeepSpeed's engine, and leave when all do."""
        engine.destroy()
        dist.barrier()
        dist.destroy_process_group()
