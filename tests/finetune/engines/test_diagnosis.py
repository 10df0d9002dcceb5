"""The first value that is not finite is found, and named."""

from __future__ import annotations

import torch
from torch import nn

from finetune.engines.diagnosis import BadOutput, first_bad_output, gradient_in_words, output_in_words
from finetune.engines.loss_scale import LEAST, MOST, START, WINDOW, LossScale
from finetune.model.finite import is_finite


class Blow(nn.Module):
    """Multiplies beyond what the type holds."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> tuple[torch.Tensor, str]:
        return x * 1e30 * 1e30, "and something that is no tensor"


class Model(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            answer = block(x)
            x = answer[0] if isinstance(answer, tuple) else answer
            self.calls += 1
        return x


def test_the_first_module_with_a_bad_output_is_named_with_its_largest_input() -> None:
    model = Model(nn.Identity(), nn.Sequential(nn.Identity(), Blow()), Blow())
    found = first_bad_output(model, lambda: model(torch.tensor([3.0, -5.0])), stop=False)
    assert found is not None
    assert output_in_words(model, found) == "the output of blocks.1.1 (Blow), whose largest input was 5"
    assert model.calls == 3, "the pass went on, as other ranks need"
    assert not any(module._forward_hooks for module in model.modules())


def test_a_pass_can_end_where_the_fault_is() -> None:
    model = Model(Blow(), nn.Identity(), nn.Identity())
    assert first_bad_output(model, lambda: model(torch.ones(2)), stop=True) == BadOutput(2, 1.0)
    assert model.calls == 0


def test_a_good_pass_shows_nothing_and_masks_may_be_infinite() -> None:
    model = Model(nn.Linear(2, 2), nn.Identity())
    assert first_bad_output(model, lambda: model(torch.ones(1, 2)), stop=False) is None
    masked = Blow()
    mask = torch.full((2,), -torch.inf)
    found = first_bad_output(masked, lambda: masked(torch.tensor([2.0]), mask=mask), stop=False)
    assert found == BadOutput(0, 2.0)


def test_a_backward_pass_meets_the_last_parameter_first() -> None:
    assert gradient_in_words(["embed", "layers.0", "layers.1"]) == "the gradient of layers.1, and of 2 before it"
    assert gradient_in_words(["head"]) == "the gradient of head"
    assert gradient_in_words([]) is None


def test_one_bad_element_is_enough() -> None:
    for bad in (torch.nan, torch.inf, -torch.inf):
        assert not is_finite(torch.tensor([1.0, bad, 2.0]))
    assert is_finite(torch.tensor([1e38, -1e38]))
    assert is_finite(torch.empty(0))


def test_a_loss_scale_falls_at_once_and_rises_after_a_thousand_good_steps() -> None:
    scale = LossScale()
    scale.stepped(overflowed=True)
    assert (scale.value, scale.good_steps) == (START / 2, 0)
    for _ in range(WINDOW - 1):
        scale.stepped(overflowed=False)
    assert scale.value == START / 2
    scale.stepped(overflowed=False)
    assert (scale.value, scale.good_steps) == (START, 0)
    while scale.can_fall:
        scale.stepped(overflowed=True)
    scale.stepped(overflowed=True)
    assert scale.value == LEAST
    scale = LossScale(MOST, WINDOW - 1)
    scale.stepped(overflowed=False)
    assert scale.value == MOST
