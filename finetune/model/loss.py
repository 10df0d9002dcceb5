"""The training loss without whole logits: rows of logits are made, used for the loss and its gradients, and dropped.

The output layer of a transformers model is made to answer with the summed loss of given targets instead of logits, so every
hook around it (ZeRO-3 gathers its weight there) works as before. Gradients are computed in the forward pass, chunk by chunk,
as Liger Kernel's fused linear cross-entropy does (arXiv 2410.10989): three products in all, as without chunks.

T target rows   H hidden size   V vocabulary   R rows of one chunk   P rows of the weight at once
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from finetune.data.targets import IGNORE_INDEX
from finetune.errors import ConfigError
from finetune.model.fused_loss import LigerLoss, fused_linear_cross_entropy, obstacle
from finetune.model.pretrained import head_of

_CHUNK_BYTES: Final = {"cpu": (16 << 20, 32 << 20), "cuda": (128 << 20, 256 << 20)}
"""Fewest and most. Each chunk also reads and writes the weight's gradient, so small ones cost time; a GPU wants larger ones."""
_FEWEST_ROWS: Final = 16
_PRODUCT_BYTES: Final = 2 << 20
"""A product of 16 bits that is added to an fp32 gradient on a CPU is no larger: it is copied in fp32 for that, in the cache."""
_HALF_SCALE: Final = 16.0
_HALF_SUM: Final = 4096.0
"""Factor of the gradient of the logits while it is in fp16, whose small numbers are coarse; with many rows at once less, since
fp16 ends at 65,504 and each may add as much to one element of the weight's gradient."""
_SCALED_LOGITS: Final = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
"""Keys of configurations whose models change their logits after the output layer."""


def token_losses(logits_BLV: Tensor, targets_BL: Tensor) -> Tensor:
    """Sum over all targets of the negative log-likelihood, in fp32, from whole logits; ``IGNORE_INDEX`` does not count."""
    return nn.functional.cross_entropy(
        logits_BLV.flatten(0, 1).float(), targets_BL.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )


class HeadLoss:
    """Makes a model's output layer return the summed loss while ``of`` holds targets, and logits otherwise.

    Args:
        rows: target rows whose logits exist at once; ``None`` chooses, see ``chunk_rows``.
        fused: what computes it instead.
    """

    def __init__(self, model: PreTrainedModel, rows: int | None = None, fused: LigerLoss | None = None) -> None:
        head = head_of(model)
        assert isinstance(head, nn.Linear), "supports() was asked before"
        self.is_fused = fused is not None
        self._targets_T: Tensor | None = None
        whole = head.forward

        def forward(input: Tensor) -> Tensor:
            if self._targets_T is None:
                return whole(input)
            hidden_NH = input.flatten(0, -2)
            if fused is not None:
                return fused_linear_cross_entropy(hidden_NH, head.weight, head.bias, self._targets_T, fused)
            return linear_cross_entropy(hidden_NH, head.weight, head.bias, self._targets_T, rows)

        head.forward = forward  # type: ignore[method-assign]  # of this layer alone

    @staticmethod
    def supports(model: PreTrainedModel) -> bool:
        """Whether the model's logits are what its output layer, a plain linear one, returns."""
        scaled = any(getattr(model.config, key, None) not in (None, 1, 1.0) for key in _SCALED_LOGITS)
        return type(head_of(model)) is nn.Linear and not scaled

    @contextmanager
    def of(self, targets_BL: Tensor) -> Iterator[None]:
        """Within it the model's ``logits`` are the summed loss of these targets, a scalar."""
        self._targets_T = targets_BL.flatten()
        try:
            yield
        finally:
            self._targets_T = None


def linear_cross_entropy(
    hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, targets_N: Tensor, rows: int | None = None
) -> Tensor:
    """Sum over the counted targets of -log softmax(hidden @ weight.T + bias)[target], fp32, differentiable once.

    Args:
        targets_N: int64; positions of ``IGNORE_INDEX`` cost nothing, neither time nor memory.
        rows: rows of logits at once; ``None`` chooses.
    """
    loss: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        hidden_NH, weight_VH, bias_V, targets_N, rows, torch.is_grad_enabled()
    )
    return loss


def check_fused_loss(device: str, precision: str, model: PreTrainedModel) -> None:
    """Refuse ``activations.loss: fused`` where it cannot be computed.

    Raises:
        ConfigError: names the key and the way out.
    """
    why = obstacle(device, precision)
    if not why and not HeadLoss.supports(model):
        why = f"a {model.config.model_type} model changes its logits after its output layer, or has none that is linear"
    if why:
        raise ConfigError(f"activations.loss is fused; {why}: choose rows")


def chunk_rows(num_targets: int, vocab_size: int, device: str = "cpu") -> int:
    """Rows of fp32 logits at once: a sixteenth of all, within 16 to 32 MiB (128 to 256 on a GPU), at least 16."""
    fewest, most = (size // (4 * vocab_size) for size in _CHUNK_BYTES.get(device, _CHUNK_BYTES["cpu"]))
    return max(_FEWEST_ROWS, min(most, max(fewest, -(-num_targets // 16))))


def product_rows(weight_VH: Tensor, device: str) -> int:
    """Rows of a weight whose gradient of 16 bits is computed, and added in fp32, at once: all of them on a GPU."""
    vocab, hidden = weight_VH.shape
    return vocab if device == "cuda" else max(1, min(vocab, _PRODUCT_BYTES // (weight_VH.itemsize * hidden)))


class _Kept(Protocol):
    """What the forward pass leaves for the backward pass; torch makes it."""

    needs_input_grad: tuple[bool, ...]
    gradients: _Gradients
    index_T: Tensor | None
    """Rows of the hidden states that count; ``None``: all."""
    num_rows: int


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Kept,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        rows: int | None,
        with_gradients: bool,
    ) -> Tensor:
        index_T = (targets_N != IGNORE_INDEX).nonzero().squeeze(1)
        everything = len(index_T) == len(targets_N)
        hidden_TH = hidden_NH if everything else hidden_NH[index_T]
        targets_T = targets_N if everything else targets_N[index_T]
        rows = rows or chunk_rows(len(targets_T), len(weight_VH), weight_VH.device.type)
        of_hidden, of_weight, of_bias = (with_gradients and needed for needed in ctx.needs_input_grad[:3])
        gradients = _Gradients(hidden_TH, weight_VH, bias_V, of_hidden, of_weight, of_bias, rows)
        # One buffer for all chunks: made anew for each, blocks of this size leave holes in the allocator's heap.
        logits_RV = weight_VH.new_empty(min(rows, len(targets_T)), len(weight_VH))
        loss = torch.zeros((), dtype=torch.float64, device=hidden_NH.device)
        for begin in range(0, len(targets_T), rows):
            part = slice(begin, begin + rows)
            loss += _chunk(hidden_TH[part], weight_VH, bias_V, targets_T[part], logits_RV, gradients, part)
        ctx.gradients = gradients
        ctx.index_T, ctx.num_rows = (None if everything else index_T), len(hidden_NH)
        return loss.float()

    @staticmethod
    def backward(ctx: _Kept, grad: Tensor) -> tuple[Tensor | None, ...]:
        found = ctx.gradients
        del ctx.gradients  # large, and of no use twice
        hidden = None
        if found.hidden_TH is not None:
            hidden = found.hidden_TH.mul_(grad / found.scale)
            if ctx.index_T is not None:
                scattered = hidden.new_zeros(ctx.num_rows, hidden.shape[1])
                hidden = scattered.index_copy_(0, ctx.index_T, hidden)
        weight = found.weight_VH(grad).mul_(grad / found.scale).to(found.dtype) if found.of_weight else None
        bias = None if found.bias_V is None else found.bias_V.mul_(grad).to(found.dtype)
        return hidden, weight, bias, None, None, None


class _Gradients:
    """Where the gradients of one forward pass are collected: of the weight in fp32, of the hidden states in their type.

    Both are ``scale`` times too large.
    """

    def __init__(
        self,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        of_hidden: bool,
        of_weight: bool,
        of_bias: bool,
        rows: int,
    ) -> None:
        self.dtype = weight_VH.dtype
        self.scale = min(_HALF_SCALE, _HALF_SUM / rows) if self.dtype == torch.float16 else 1.0
        self.hidden_TH = torch.empty_like(hidden_TH) if of_hidden else None
        self.of_weight = of_weight
        self._weight_VH: Tensor | None = None
        self._weight_shape, self._product_rows = weight_VH.shape, product_rows(weight_VH, weight_VH.device.type)
        self.bias_V = torch.zeros_like(bias_V, dtype=torch.float32) if bias_V is not None and of_bias else None

    @property
    def wanted(self) -> bool:
        return self.hidden_TH is not None or self.of_weight or self.bias_V is not None

    def add_to_weight(self, typed_RV: Tensor, hidden_RH: Tensor) -> None:
        """Add the gradient of the weight from some rows, that of their logits given."""
        first = self._weight_VH is None  # zeros to add to would be a pass over memory more
        if self._weight_VH is None:
            self._weight_VH = torch.empty(self._weight_shape, dtype=torch.float32, device=typed_RV.device)
        if self.dtype == torch.float32:
            self._weight_VH.addmm_(typed_RV.t(), hidden_RH, beta=0 if first else 1)
            return
        for begin in range(0, len(self._weight_VH), self._product_rows):
            part = slice(begin, begin + self._product_rows)
            product_PH = typed_RV[:, part].t() @ hidden_RH
            if first:
                self._weight_VH[part] = product_PH
            else:
                self._weight_VH[part] += product_PH

    def weight_VH(self, like: Tensor) -> Tensor:
        """What was added up; zeros where nothing was."""
        return like.new_zeros(self._weight_shape, dtype=torch.float32) if self._weight_VH is None else self._weight_VH


def _chunk(
    hidden_RH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    targets_R: Tensor,
    buffer_RV: Tensor,
    gradients: _Gradients,
    part: slice,
) -> Tensor:
    """The summed loss of some rows, fp64; their share is added to the gradients. ``buffer_RV`` is overwritten."""
    typed_RV = torch.mm(hidden_RH, weight_VH.t(), out=buffer_RV[: len(hidden_RH)])
    if bias_V is not None:
        typed_RV += bias_V
    logits_RV = typed_RV.float()  # the same memory, if that is its type
    largest_R1 = logits_RV.amax(dim=1, keepdim=True)
    target_R1 = logits_RV.gather(1, targets_R[:, None])
    logits_RV.sub_(largest_R1).exp_()
    sum_R1 = logits_RV.sum(dim=1, keepdim=True)
    loss = (sum_R1.log() + largest_R1 - target_R1).double().sum()
    if gradients.wanted:
        # The gradient of the logits, softmax - one-hot, in their place.
        logits_RV.div_(sum_R1).scatter_add_(1, targets_R[:, None], torch.full_like(target_R1, -1.0))
        if gradients.bias_V is not None:
            gradients.bias_V += logits_RV.sum(dim=0)
        if typed_RV is not logits_RV:
            typed_RV.copy_(logits_RV.mul_(gradients.scale) if gradients.scale != 1.0 else logits_RV)
        if gradients.hidden_TH is not None:
            torch.mm(typed_RV, weight_VH, out=gradients.hidden_TH[part])
        if gradients.of_weight:
            gradients.add_to_weight(typed_RV, hidden_RH)
    return loss
