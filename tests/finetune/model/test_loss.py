"""The loss in chunks equals the loss of whole logits, in value and gradient, and never holds them whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoXConfig, PhiConfig

import finetune.model.loss as losses
from finetune.model.loss import HeadLoss, chunk_rows, linear_cross_entropy, token_losses


def problem(dtype: torch.dtype = torch.float32, *, rows: int = 37, vocab: int = 101, hidden: int = 24) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(3)
    targets = torch.randint(0, vocab, (rows,), generator=draw)
    targets[5:9] = -100
    return {
        "hidden": torch.randn(rows, hidden, generator=draw).to(dtype).requires_grad_(),
        "weight": torch.randn(vocab, hidden, generator=draw).to(dtype).requires_grad_(),
        "bias": torch.randn(vocab, generator=draw).to(dtype).requires_grad_(),
        "targets": targets,
    }


def whole(p: dict[str, Tensor]) -> Tensor:
    return token_losses(nn.functional.linear(p["hidden"], p["weight"], p["bias"])[None], p["targets"][None])


def gradients(p: dict[str, Tensor], loss: Tensor) -> dict[str, Tensor]:
    (loss * 0.37).backward()
    found = {name: tensor.grad for name, tensor in p.items() if tensor.grad is not None}
    for name in found:
        p[name].grad = None
    return found


@pytest.mark.parametrize("rows", [1, 7, 16, 33, 1000, None])
def test_chunks_give_the_loss_and_the_gradients_of_whole_logits(rows: int | None) -> None:
    p = problem()
    expected, expected_gradients = whole(p).detach(), gradients(p, whole(p))
    loss = linear_cross_entropy(p["hidden"], p["weight"], p["bias"], p["targets"], rows)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    found = gradients(p, loss)
    assert found.keys() == expected_gradients.keys() == {"hidden", "weight", "bias"}
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_as_near_to_fp32_as_whole_logits_are(dtype: torch.dtype) -> None:
    exact = problem()
    reference = gradients(exact, whole(exact))
    p = problem(dtype)
    plain = gradients(p, whole(p))
    chunked = gradients(p, linear_cross_entropy(p["hidden"], p["weight"], p["bias"], p["targets"], 8))
    for name, gradient in chunked.items():
        assert gradient.dtype == dtype
        error = (gradient.float() - reference[name]).norm()
        assert error <= 1.2 * (plain[name].float() - reference[name]).norm() + 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_weights_gradient_of_16_bits_may_be_added_up_a_few_rows_at_a_time(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    p = problem(dtype)

    vocab, hidden = p["weight"].shape

    def computed(rows: int) -> tuple[set[int], dict[str, Tensor]]:
        monkeypatch.setattr(losses, "_PRODUCT_BYTES", rows * hidden * 2)
        with Products() as seen:
            loss = linear_cross_entropy(p["hidden"], p["weight"], p["bias"], p["targets"], 8)
        return {rows for rows, columns in seen.shapes if columns == hidden and rows != 8}, gradients(p, loss)

    (few, found), (every, whole) = computed(5), computed(2 * vocab)
    assert {5, vocab % 5} <= few < {*range(8)}, "products of no more rows, and of the last part, which is shorter"
    assert vocab in every
    torch.testing.assert_close(found, whole, rtol=0, atol=0)


class Products(TorchDispatchMode):
    """Remembers the shapes of matrix products."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.mm.out):
            self.shapes.append(tuple(made.shape))
        return made


def test_a_frozen_weight_gets_no_gradient_and_costs_none() -> None:
    p = problem()
    p["weight"].requires_grad_(False)
    p["bias"].requires_grad_(False)
    assert gradients(p, linear_cross_entropy(p["hidden"], p["weight"], p["bias"], p["targets"])).keys() == {"hidden"}


def test_without_gradients_nothing_is_kept() -> None:
    p = problem()
    with torch.no_grad():
        loss = linear_cross_entropy(p["hidden"], p["weight"], p["bias"], p["targets"])
    assert not loss.requires_grad
    assert float(loss.detach()) == pytest.approx(float(whole(p).detach()), rel=1e-6)


def test_no_target_at_all_costs_nothing() -> None:
    p = problem()
    p["targets"].fill_(-100)
    loss = linear_cross_entropy(p["hidden"], p["weight"], p["bias"], p["targets"])
    found = gradients(p, loss)
    assert float(loss.detach()) == 0.0
    assert all(float(gradient.abs().sum()) == 0.0 for gradient in found.values())


class _LargestTensor(TorchDispatchMode):
    """Remembers the largest output of any operation with a row for each of the problem's many rows."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.vocab, self.rows = vocab, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor) and tensor.ndim == 2 and tensor.shape[1] == self.vocab:
                self.rows = max(self.rows, tensor.shape[0])
        return result


def test_logits_are_never_whole() -> None:
    p = problem(rows=2048, vocab=20_000, hidden=8)
    count = int((p["targets"] != -100).sum())
    with _LargestTensor(20_000) as seen:
        linear_cross_entropy(p["hidden"], p["weight"], None, p["targets"]).backward()
    assert 0 < seen.rows == chunk_rows(count, 20_000) <= 2048 // 8


@pytest.mark.parametrize(("targets", "rows"), [(100, 83), (2048, 128), (16_000, 166)])
def test_chunks_are_a_sixteenth_within_bounds(targets: int, rows: int) -> None:
    assert chunk_rows(targets, 50_304) == rows


SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 97}
MODELS = {
    "gpt_neox": GPTNeoXConfig(**SIZES, intermediate_size=32),
    "gpt2, tied": GPT2Config(**SIZES, n_positions=64),
    "phi, with bias": PhiConfig(**SIZES, intermediate_size=32),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_models_output_layer_answers_with_the_loss(name: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODELS[name]).eval()
    ids, targets = torch.randint(0, 97, (2, 2, 12))
    expected = token_losses(model(input_ids=ids).logits, targets)
    expected.backward()
    before = {key: parameter.grad.clone() for key, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    assert HeadLoss.supports(model)
    head = HeadLoss(model, rows=5)
    with head.of(targets):
        loss = model(input_ids=ids).logits
    loss.backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    for key, parameter in model.named_parameters():
        if key in before:
            torch.testing.assert_close(parameter.grad, before[key], rtol=1e-4, atol=1e-6)
    assert model(input_ids=ids).logits.shape == (2, 12, 97)


def test_a_model_that_changes_its_logits_keeps_them_whole() -> None:
    model = AutoModelForCausalLM.from_config(MODELS["gpt_neox"])
    model.config.final_logit_softcapping = 30.0
    assert not HeadLoss.supports(model)
