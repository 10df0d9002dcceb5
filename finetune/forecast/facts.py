"""The model of a run without its weights: parameters counted, and one micro-batch run on tensors that have no storage.

torch's fake tensors know shapes, types and lifetimes and hold no bytes. Every storage that a forward and backward pass would
have made is counted while it lives, so recomputed blocks, chunked losses and adapters are seen as they are, for any model.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import PreTrainedModel

from finetune.adapters import add_adapters
from finetune.config import TuneConfig
from finetune.loss import HeadLoss, chunk_rows, token_losses
from finetune.model import build_empty
from finetune.moments import groups_of, matrices_of
from finetune.recompute import recompute_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The busiest moment between two gradients of a backward pass (or of the forward pass before the first)."""

    gradients: int
    """Gradient elements finished by then."""
    live_bytes: int
    """Activations and temporaries alive, finished gradients not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the forecast knows of a model and of one micro-batch."""

    trained: int
    """Elements with a gradient."""
    frozen: int
    """Elements without one."""
    largest: int
    """Elements of the largest tensor."""
    largest_group: int
    """Elements of the optimizer's largest group: those that decay, those that do not, or matrices it treats as such."""
    matrices: int
    """Elements of what the optimizer treats as matrices; 0 for one that works element by element."""
    factors: int
    """Rows and columns of all those matrices, added."""
    largest_matrix: int
    """Elements of the largest of them."""
    multiplied: int
    """Elements that every token is multiplied with: no lookup tables."""
    layers: int
    hidden: int
    vocab: int
    moments: tuple[Moment, ...]
    """Of one micro-batch."""
    saved_inputs_bytes: int
    """Of that, block inputs kept for recomputation; they can wait in the host's memory."""

    @property
    def total(self) -> int:
        return self.trained + self.frozen

    @property
    def activation_bytes(self) -> int:
        """Most bytes alive in one micro-batch, gradients of weights not counted."""
        return max(moment.live_bytes for moment in self.moments)

    def flops_per_token(self, seq_len: int) -> float:
        """Operations of one trained token, as PaLM's model FLOPs count them: no recomputation, whole attention squares.

        A frozen weight takes part in the forward pass and in the gradient of its input, but has no gradient itself.
        """
        share = self.trained / self.total
        return self.multiplied * (4 + 2 * share) + 12 * self.layers * self.hidden * seq_len


def facts_of(config: TuneConfig, hf_config: Any, precision: str, *, on_gpu: bool) -> ModelFacts:
    """Build the run's model on fake tensors, adapters and recomputation included, and follow one micro-batch through it."""
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    if on_gpu:
        hf_config = _without_attention_dropout(hf_config)
    with torch.device("meta"):  # adapters move themselves to their layer's device, which fake tensors cannot follow
        model = build_empty(hf_config, dtype, nullcontext())
        wrapped = _prepared(model, config)
    with FakeTensorMode():
        _pretend(wrapped)
        moments = _follow(wrapped, model, config)
    trained = sum(p.numel() for p in wrapped.parameters() if p.requires_grad)
    every = [p.numel() for p in wrapped.parameters()]
    names = matrices_of(wrapped, config.algorithm)
    matrices = [p.shape for name, p in wrapped.named_parameters() if name in names]
    groups = groups_of(wrapped, config.algorithm, config.optimizer.weight_decay)
    hidden = int(model.config.hidden_size)
    layers = int(model.config.num_hidden_layers)
    recomputed = config.activations.checkpoint != "none"
    block_input = config.batch.micro * config.data.seq_len * hidden * dtype.itemsize
    return ModelFacts(
        trained=trained,
        frozen=sum(every) - trained,
        largest=max(every),
        largest_group=max(sum(p.numel() for p in group["params"]) for group in groups),
        matrices=sum(shape.numel() for shape in matrices),
        factors=sum(sum(shape) for shape in matrices),
        largest_matrix=max((shape.numel() for shape in matrices), default=0),
        multiplied=_multiplied(model, wrapped),
        layers=layers,
        hidden=hidden,
        vocab=int(model.config.vocab_size),
        moments=moments,
        saved_inputs_bytes=layers * block_input if recomputed else 0,
    )


def _without_attention_dropout(hf_config: Any) -> Any:
    """A GPU's attention kernel drops inside; the CPU's, which is simulated, would keep whole squares for it."""
    changed = type(hf_config)(**hf_config.to_dict())
    for name in ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob"):
        if hasattr(changed, name):
            setattr(changed, name, 0.0)
    return changed


def _prepared(model: PreTrainedModel, config: TuneConfig) -> nn.Module:
    """The model as the engine trains it: adapters beside frozen weights, blocks that are computed again."""
    wrapped: nn.Module = model
    if config.lora is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft misses the name of a model that was built from its configuration
            wrapped = add_adapters(model, config.lora, base=str(config.model.path), seed=config.run.seed)
    if config.activations.checkpoint != "none":
        recompute_blocks(model, "device", pin_memory=False)
    return wrapped.train()


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
                    owned[name] = fake(tensor)  # type: ignore[assignment]
    del originals


def _multiplied(model: PreTrainedModel, wrapped: nn.Module) -> int:
    """Elements of weights that take part in products: lookups do not, unless the table is the output layer too."""
    tables = {id(m.weight): m.weight.numel() for m in model.modules() if isinstance(m, nn.Embedding)}
    head = model.get_output_embeddings()
    if head is not None:
        tables.pop(id(head.weight), None)
    return sum(p.numel() for p in wrapped.parameters() if p.ndim >= 2 and id(p) not in tables)


# -- one micro-batch


def _follow(wrapped: nn.Module, model: PreTrainedModel, config: TuneConfig) -> tuple[Moment, ...]:
    alive = _Alive(list(wrapped.parameters()) + list(wrapped.buffers()))
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(alive.finished)
    shape = (config.batch.micro, config.data.seq_len)
    with alive:
        inputs = torch.zeros(shape, dtype=torch.int64)
        targets = torch.zeros(shape, dtype=torch.int64)
        with _loss_as_trained(model, config) as chunked:
            output = wrapped(input_ids=inputs, use_cache=False).logits
            loss = output if chunked else token_losses(output, targets)
            del output
            loss.backward()
    return alive.moments()


@contextmanager
def _loss_as_trained(model: PreTrainedModel, config: TuneConfig) -> Iterator[bool]:
    """Let the output layer answer with a loss that takes the memory of the real one; false when that has whole logits."""
    rows = config.activations.loss_rows
    if rows == 0 or not HeadLoss.supports(model):
        yield False
        return
    head: Any = model.get_output_embeddings()
    count = config.batch.micro * config.data.seq_len
    head.forward = lambda hidden: _ChunkedLoss.apply(
        hidden.flatten(0, -2), head.weight, min(count, rows or chunk_rows(count, len(head.weight)))
    )
    yield True


class _ChunkedLoss(torch.autograd.Function):
    """Makes and keeps tensors of the sizes that ``finetune.loss`` makes and keeps; computes nothing."""

    @staticmethod
    def forward(ctx: Any, hidden_TH: torch.Tensor, weight_VH: torch.Tensor, rows: int) -> torch.Tensor:  # type: ignore[override]
        ctx.hidden_TH = torch.empty_like(hidden_TH)
        wanted = ctx.needs_input_grad[1]
        ctx.weight_VH = torch.empty_like(weight_VH, dtype=torch.float32) if wanted else None
        logits_RV = torch.empty(rows, len(weight_VH), dtype=torch.float32)
        typed_RV = torch.empty(rows, len(weight_VH), dtype=weight_VH.dtype) if weight_VH.dtype != torch.float32 else None
        del logits_RV, typed_RV
        return torch.empty(())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        hidden, weight = ctx.hidden_TH, ctx.weight_VH
        del ctx.hidden_TH, ctx.weight_VH
        return hidden, None if weight is None else weight.to(hidden.dtype), None


class _Alive(TorchDispatchMode):
    """Counts the bytes of every storage made inside it, as long as it lives."""

    def __init__(self, owned: list[torch.Tensor]) -> None:
        super().__init__()
        self._known: dict[int, Any] = {t.untyped_storage()._cdata: t for t in owned}
        self._live = self._peak = self._gradients = 0
        self._moments: list[Moment] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_iter(made):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return made

    def _count(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return

        def gone(_: Any) -> None:
            if self._known.pop(key, None) is not None:
                self._live -= size

        self._known[key] = weakref.ref(storage, gone)
        self._live += size
        self._peak = max(self._peak, self._live)

    def finished(self, parameter: torch.Tensor) -> None:
        """A gradient is whole: it is counted with the gradients from here on."""
        self._moments.append(Moment(gradients=self._gradients, live_bytes=self._peak))
        self._gradients += parameter.numel()
        parameter.grad = None
        self._peak = self._live

    def moments(self) -> tuple[Moment, ...]:
        return (*self._moments, Moment(gradients=self._gradients, live_bytes=self._peak))
