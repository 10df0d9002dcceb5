"""What is left out of the calls of a model's layers, and that nothing of the model is lost by it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from serve.model.lean import call_leaves_directly


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(self.up(x)))


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.layers = nn.ModuleList(_Layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x


def test_the_model_computes_the_same_and_keeps_its_modules() -> None:
    model = _Model().eval()
    x = torch.randn(2, 3)
    expected, names = model(x), [name for name, _ in model.named_modules()]
    call_leaves_directly(model)
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
    assert [name for name, _ in model.named_modules()] == names
    assert len(model.state_dict()) == 10


def test_leaves_of_layers_are_reached_without_a_search() -> None:
    model = _Model()
    call_leaves_directly(model)
    layer = model.layers[0]
    assert layer.__dict__["up"] == layer._modules["up"].forward  # type: ignore[union-attr]
    x = torch.randn(1, 4)
    assert layer.drop(x) is x
    assert "embed" not in model.__dict__


def test_a_hook_that_is_there_already_still_runs() -> None:
    model = _Model()
    seen: list[Tensor] = []
    model.layers[1].down.register_forward_hook(lambda *_: seen.append(_[2]))  # type: ignore[union-attr,operator]
    call_leaves_directly(model)
    model(torch.randn(2, 3))
    assert len(seen) == 1
