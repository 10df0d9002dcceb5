"""One micro-batch run on tensors that have no storage: what is made and freed, in order.

torch's fake tensors know shapes, types and lifetimes and hold no bytes. Every storage that a forward and backward pass would
have made is written down while it lives, so recomputed blocks, chunked losses and adapters are seen as they are, for any model.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import PreTrainedModel, masking_utils

from finetune.config import TuneConfig
from finetune.forecast.work import Tally, Work
from finetune.model.fused_loss import fused_rows
from finetune.model.hooks import after_each_gradient
from finetune.model.isolation import BY_MASK
from finetune.model.loss import HeadLoss, chunk_rows, product_rows, token_losses
from finetune.model.pretrained import head_of


class What(Enum):
    """Kinds of events that happen to a micro-batch's memory."""

    MADE = "made"
    """Storage ``number`` of ``size`` bytes."""
    FREED = "freed"
    """Storage ``number``."""
    USED = "used"
    """The forward pass comes to parameter ``number`` of ``size`` elements for the first time."""
    GRADIENT = "gradient"
    """The gradient of parameter ``number``, of ``size`` elements, is whole. Its storage is freed at once."""


class Event(NamedTuple):
    """One thing that happens to memory while a micro-batch is followed."""

    what: What
    number: int
    """Which storage or parameter, counted from 0."""
    size: int
    """Bytes of a storage; elements of a parameter."""


Trace = tuple[Event, ...]
"""A micro-batch's forward and backward pass."""


def follow(
    wrapped: nn.Module,
    model: PreTrainedModel,
    config: TuneConfig,
    *,
    device: str,
    packed: bool,
    masked: bool,
    whole_logits: bool,
) -> tuple[Trace, Work]:
    """Follow one micro-batch through the model's forward and backward pass: what it holds, and what it computes.

    Args:
        wrapped: the model as it is trained, adapters included; its tensors are replaced by fake ones.
        device: ``cpu`` or ``cuda``, which decides how much of a loss in rows is there at once.
        packed: whether rows hold several samples that do not see each other.
        masked: whether a mask keeps them apart. Attention by lengths takes the memory of rows of one sample each.
        whole_logits: whether the loss is taken from all logits at once.
    """
    with FakeTensorMode():
        _pretend(wrapped)
        seen = _Witness(wrapped)
        shape = (config.batch.micro, config.data.seq_len)
        with seen, _loss_as_trained(model, config, device, packed, whole_logits) as chunked, _masks_as_trained(masked):
            inputs = torch.zeros(shape, dtype=torch.int64)
            targets = torch.zeros(shape, dtype=torch.int64)
            more: dict[str, torch.Tensor] = {}
            if packed:
                more["position_ids"] = torch.zeros(shape, dtype=torch.int64)
                if masked and model.config.model_type in BY_MASK:
                    more["attention_mask"] = torch.ones(shape[0], 1, shape[1], shape[1], dtype=torch.bool)
            output = wrapped(input_ids=inputs, use_cache=False, **more).logits
            loss = output if chunked else token_losses(output, targets)
            del output, more
            loss.backward()
            del loss, inputs, targets
    if chunked:
        _count_head(seen.tally, model, config, device)
    return tuple(seen.events), seen.tally.work(tensors=sum(p.requires_grad for p in wrapped.parameters()))


def _count_head(tally: Tally, model: PreTrainedModel, config: TuneConfig, device: str) -> None:
    weight = _head_of(model).weight
    count = config.batch.micro * config.data.seq_len
    rows = _rows_at_once(config, count, weight, device)
    vocab, hidden = weight.shape
    tally.head(count, rows, hidden, vocab, trained=weight.requires_grad, width=weight.itemsize)


def _pretend(model: nn.Module) -> None:
    """Put a fake tensor on the CPU in the place of every parameter and buffer; tied ones stay tied."""
    made: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            empty = torch.empty(tensor.shape, dtype=tensor.dtype)
            made[id(tensor)] = (
                nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
            )
        return made[id(tensor)]

    originals = [*model.parameters(), *model.buffers()]  # alive until the end, so that no two have one id
    for module in model.modules():
        for owned in (module._parameters, module._buffers):
            for name, tensor in owned.items():
                if tensor is not None:
                    owned[name] = fake(tensor)  # type: ignore[assignment]  # a parameter in the place of a parameter
    del originals


@contextmanager
def _masks_as_trained(masked: bool) -> Iterator[None]:
    """Let transformers leave out the mask of rows that are one sample each.

    It looks at the positions for that, which fake tensors do not have, and would make the mask to be safe: a square for each
    row, kept by every layer.
    """
    if masked:
        yield
        return
    looks = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = looks


@contextmanager
def _loss_as_trained(
    model: PreTrainedModel, config: TuneConfig, device: str, packed: bool, whole_logits: bool
) -> Iterator[bool]:
    """Let the output layer answer with a loss that takes the memory of the real one; false when that has whole logits."""
    if whole_logits or not HeadLoss.supports(model):
        yield False
        return
    head = _head_of(model)
    rows = _rows_at_once(config, config.batch.micro * config.data.seq_len, head.weight, device)
    product = product_rows(head.weight, device)
    chosen = packed and config.activations.loss == "rows"

    def forward(input: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]  # torch leaves it unannotated
            input.flatten(0, -2), head.weight, rows, chosen, product
        )
        return loss

    head.forward = forward  # type: ignore[method-assign]  # of this layer alone
    yield True


def _rows_at_once(config: TuneConfig, count: int, weight_VH: torch.Tensor, device: str) -> int:
    """Rows of logits that the loss of ``count`` targets has at once."""
    vocab, hidden = weight_VH.shape
    if config.activations.loss == "fused":
        return fused_rows(count, vocab, hidden)
    return min(count, config.activations.loss_rows or chunk_rows(count, vocab, device))


def _head_of(model: PreTrainedModel) -> nn.Linear:
    head = head_of(model)
    assert isinstance(head, nn.Linear), "HeadLoss.supports was asked before"
    return head


class _Kept(Protocol):
    """What the forward pass leaves for the backward pass; torch makes it."""

    needs_input_grad: tuple[bool, ...]
    packed: bool
    hidden_TH: torch.Tensor
    weight_VH: torch.Tensor | None


class _ChunkedLoss(torch.autograd.Function):
    """Makes and keeps tensors of the sizes that ``finetune.model.loss`` makes and keeps; computes nothing."""

    @staticmethod
    def forward(
        ctx: _Kept, hidden_NH: torch.Tensor, weight_VH: torch.Tensor, rows: int, packed: bool, product: int
    ) -> torch.Tensor:
        ctx.packed = packed
        hidden_TH = torch.empty_like(hidden_NH) if packed else hidden_NH  # the rows of targets that count, about all
        ctx.hidden_TH = torch.empty_like(hidden_TH)
        typed = weight_VH.dtype != torch.float32
        buffer_RV = weight_VH.new_empty(rows, len(weight_VH))
        ctx.weight_VH = None
        for _ in range(2):  # the first chunk, and one that adds to it
            logits_RV = buffer_RV.float() if typed else buffer_RV
            if ctx.needs_input_grad[1]:
                if ctx.weight_VH is None:
                    ctx.weight_VH = torch.empty_like(weight_VH, dtype=torch.float32)
                if typed:
                    # With the fp32 copy of it that torch makes on a CPU to add it.
                    product_PH = torch.empty_like(weight_VH[:product])
                    if product < len(weight_VH):
                        product_PH.float()
                    del product_PH
            del logits_RV
        return torch.empty(())

    @staticmethod
    def backward(ctx: _Kept, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight = ctx.hidden_TH, ctx.weight_VH
        del ctx.hidden_TH, ctx.weight_VH
        if ctx.packed:
            hidden = torch.empty_like(hidden)  # with zeros where nothing counts
        return hidden, None if weight is None else weight.to(hidden.dtype), None, None, None


class _Witness(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    """Writes down every storage made inside it, and when it is freed."""

    def __init__(self, wrapped: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self.events: list[Event] = []
        self.tally = Tally()
        self._count = 0
        owned: Sequence[torch.Tensor] = [*wrapped.parameters(), *wrapped.buffers()]
        self._known: dict[int, Any] = {t.untyped_storage()._cdata: t for t in owned}
        self._numbers = {id(parameter): number for number, parameter in enumerate(wrapped.parameters())}
        self._used: set[int] = set()
        for module in wrapped.modules():
            if module._parameters:
                module.register_forward_pre_hook(self._comes_to)
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                after_each_gradient(parameter, self._finished)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        self.tally.see(func, args, made)
        for tensor in tree_iter(made):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor.untyped_storage())
        return made

    def _see(self, storage: Any) -> None:
        key, number = storage._cdata, self._count
        if key in self._known:
            return

        def gone(_: Any) -> None:
            if self._known.pop(key, None) is not None:
                self.events.append(Event(What.FREED, number, 0))

        self._known[key] = weakref.ref(storage, gone)
        self.events.append(Event(What.MADE, number, storage.nbytes()))
        self._count += 1

    def _comes_to(self, module: nn.Module, _: Any) -> None:
        for parameter in module.parameters(recurse=False):
            number = self._numbers[id(parameter)]
            if number not in self._used:
                self._used.add(number)
                self.events.append(Event(What.USED, number, parameter.numel()))

    def _finished(self, parameter: torch.Tensor) -> None:
        self.events.append(Event(What.GRADIENT, self._numbers[id(parameter)], parameter.numel()))
        parameter.grad = None
