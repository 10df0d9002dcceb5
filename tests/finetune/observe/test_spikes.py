"""The watch for loss spikes, by itself."""

from __future__ import annotations

import random

import pytest

from finetune.config import SpikeConfig
from finetune.errors import ConfigError
from finetune.observe.spikes import Spike, SpikeWatch


def spikes_in(losses: list[float], **options: object) -> list[Spike]:
    watch = SpikeWatch(SpikeConfig(**{"window": 20, "steps": 3, **options}))  # type: ignore[arg-type]
    return [spike for step, loss in enumerate(losses, 1) if (spike := watch.see(step, loss)) is not None]


def falling(count: int) -> list[float]:
    draw = random.Random(1)
    return [5.0 - 0.01 * step + draw.gauss(0, 0.05) for step in range(count)]


def test_a_loss_that_falls_with_noise_has_no_spike() -> None:
    assert spikes_in(falling(400)) == []


def test_a_rise_that_stays_is_told_once_with_its_first_step_and_what_was_usual() -> None:
    (spike,) = spikes_in([*falling(100), 9.0, 9.5, 9.2, 9.1, *falling(20)])
    assert (spike.first_step, spike.step) == (101, 103)
    assert spike.loss == 9.5
    assert spike.usual == pytest.approx(4.1, abs=0.2)
    assert "steps 101 to 103" in str(spike)


def test_single_hard_batches_are_none() -> None:
    losses = falling(100)
    losses[40] = losses[60] = losses[61] = 9.0
    assert spikes_in(losses) == []


def test_a_second_rise_is_told_again() -> None:
    assert len(spikes_in([*falling(50), *[9.0] * 4, *falling(50), *[9.0] * 4])) == 2


def test_a_new_level_becomes_usual() -> None:
    assert len(spikes_in([*falling(50), *[9.0] * 300])) == 1


def test_a_loss_that_hardly_moves_has_no_spikes_of_rounding() -> None:
    assert spikes_in([2.0] * 50 + [2.0001] * 50) == []


def test_nothing_is_told_before_half_a_window_or_when_off() -> None:
    assert spikes_in([1.0] * 5 + [9.0] * 5) == []
    assert spikes_in([*falling(50), *[9.0] * 5], action="off") == []


@pytest.mark.parametrize(("key", "value"), [("window", 3), ("deviations", 0.0), ("deviations", float("nan")), ("steps", 0)])
def test_rules(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"spike.{key}"):
        SpikeConfig(**{key: value})  # type: ignore[arg-type]
