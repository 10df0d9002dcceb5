"""The loss by liger-kernel, with what stands for it: targets that do not count, the scale of the sum, bias, refusals."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from finetune.errors import ConfigError
from finetune.model import fused_loss
from finetune.model.fused_loss import fused_linear_cross_entropy, fused_rows, liger_loss, obstacle
from finetune.model.loss import HeadLoss, check_fused_loss, linear_cross_entropy, token_losses
from tests.finetune.model.test_isolation import packed, tiny
from tests.finetune.stand_ins import CountedLiger


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> CountedLiger:
    liger = CountedLiger()
    functional = ModuleType("liger_kernel.transformers.functional")
    functional.liger_fused_linear_cross_entropy = liger  # type: ignore[attr-defined]  # as the library has it
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, functional.__name__, functional)
    return liger


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradients_are_those_of_the_rows(biased: bool, dtype: torch.dtype) -> None:
    source = torch.Generator().manual_seed(2)
    shapes = [(37, 16), (50, 16)] + ([(50,)] if biased else [])
    targets = torch.randint(0, 50, (37,), generator=source)
    targets[::3] = -100
    found = []
    for fused in (False, True):
        source.manual_seed(3)
        given = [torch.randn(shape, generator=source).to(dtype).requires_grad_() for shape in shapes]
        hidden, weight, bias = (*given, None)[:3]
        loss = (
            fused_linear_cross_entropy(hidden, weight, bias, targets, CountedLiger())
            if fused
            else linear_cross_entropy(hidden, weight, bias, targets)
        )
        (loss * 0.25).backward()
        found.append([loss.detach(), *(part.grad for part in given)])
    assert found[1][0] is not None
    assert found[1][0].dtype == torch.float32
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    for rows, fused_part in zip(*found, strict=True):
        assert rows is not None
        torch.testing.assert_close(fused_part, rows, rtol=tolerance, atol=tolerance)


def test_the_output_layer_answers_with_it(installed: CountedLiger) -> None:
    batch, _ = packed()
    model = tiny("gpt_neox")
    whole = token_losses(model(input_ids=batch.inputs).logits, batch.targets)
    found = liger_loss()
    assert found is installed
    loss = HeadLoss(model, fused=found)
    with loss.of(batch.targets):
        fused = model(input_ids=batch.inputs).logits
    assert float(fused.detach()) == pytest.approx(float(whole.detach()), rel=1e-6)
    assert installed.calls == 1
    assert model(input_ids=batch.inputs).logits.shape == (2, 48, 50), "and with logits again"


def test_no_target_that_counts_costs_nothing_and_teaches_nothing() -> None:
    hidden, weight = torch.randn(5, 8, requires_grad=True), torch.randn(20, 8, requires_grad=True)
    loss = fused_linear_cross_entropy(hidden, weight, None, torch.full((5,), -100), CountedLiger())
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert hidden.grad is not None
    assert not hidden.grad.any()


def test_rows_at_once_are_as_many_as_the_library_chooses() -> None:
    assert fused_rows(16384, 32000, 4096) == 2048, "its own example"
    assert fused_rows(96, 512, 64) == 16
    assert fused_rows(10, 16, 64) == 10, "never more than there are"


def test_where_it_cannot_be_computed_it_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, installed: CountedLiger) -> None:
    model = tiny("gpt_neox")
    check_fused_loss("cuda", "bf16", model)
    cases = (
        ("cpu", "bf16", "liger-kernel's is for GPUs, and this run is on the cpu"),
        ("cuda", "fp16", "in fp16 its small gradients would be lost"),
    )
    for device, precision, why in cases:
        assert obstacle(device, precision) == why
        with pytest.raises(ConfigError, match=rf"^activations.loss is fused; {why}: choose rows$"):
            check_fused_loss(device, precision, model)
    with pytest.raises(ConfigError, match=r"a gemma2 model changes its logits after its output layer"):
        check_fused_loss("cuda", "bf16", tiny("gemma2"))
    monkeypatch.setattr(fused_loss, "liger_loss", lambda: None)
    with pytest.raises(ConfigError, match=r"liger-kernel is not installed, or is too old: choose rows"):
        check_fused_loss("cuda", "bf16", model)


def test_a_release_without_the_options_that_are_asked_for_is_not_taken(installed: CountedLiger) -> None:
    def older(input: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: nn.Parameter | None = None) -> None:
        raise AssertionError("it is not called")

    assert liger_loss() is installed
    functional = sys.modules["liger_kernel.transformers.functional"]
    functional.liger_fused_linear_cross_entropy = older  # type: ignore[attr-defined]  # as the library has it
    assert liger_loss() is None
