"""The model of a run without its weights: parameters counted, and one micro-batch followed (``follow``)."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import dataclass, fields
from functools import cached_property

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from finetune.config import TuneConfig
from finetune.data.inputs import find_inputs
from finetune.errors import FinetuneError
from finetune.forecast.follow import Trace, What, follow
from finetune.forecast.work import Work
from finetune.model.adapters import add_adapters
from finetune.model.build import build_empty
from finetune.model.loss import check_fused_loss
from finetune.model.packed_attention import is_by_length
from finetune.model.pretrained import head_of
from finetune.model.recompute import recompute_blocks
from finetune.optimizers.kinds import KINDS
from finetune.optimizers.state import groups_of, matrices_of


@dataclass(frozen=True, kw_only=True)
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
    whole: int
    """Elements of what the optimizer keeps of all of them that every rank has all of."""
    largest_matrix: int
    """Elements of the largest of them."""
    multiplied: int
    """Elements that every token is multiplied with: no lookup tables."""
    layers: int
    hidden: int
    vocab: int
    trace: Trace
    """What one micro-batch makes and frees, in order."""
    work: Work
    """What one micro-batch computes and moves."""
    saved_inputs_bytes: int
    """Block inputs of a micro-batch kept for recomputation; they can wait in the host's memory."""

    @property
    def total(self) -> int:
        return self.trained + self.frozen

    @cached_property
    def activation_bytes(self) -> int:
        """Most bytes alive in one micro-batch, finished gradients of weights not counted."""
        sizes: dict[int, int] = {}
        live = most = 0
        for event in self.trace:
            if event.what is What.MADE:
                sizes[event.number] = event.size
                live += event.size
                most = max(most, live)
            elif event.what is What.FREED:
                live -= sizes.pop(event.number)
        return most

    def flops_per_token(self, seq_len: int) -> float:
        """Operations of one trained token, as PaLM's model FLOPs count them: no recomputation, whole attention squares.

        A frozen weight takes part in the forward pass and in the gradient of its input, but has no gradient itself.
        """
        share = self.trained / self.total
        return self.multiplied * (4 + 2 * share) + 12 * self.layers * self.hidden * seq_len


def facts_of(
    config: TuneConfig, hf_config: PretrainedConfig, precision: str, *, on_gpu: bool, command: str = "tune"
) -> ModelFacts:
    """Build the run's model on fake tensors, adapters and recomputation included, and follow one micro-batch through it.

    Raises:
        ConfigError: the run's attention or loss is asked for by name, and cannot be computed there.
    """
    device, packed = "cuda" if on_gpu else "cpu", packing_of(config) == "isolate"
    by_length = packed and command == "tune" and is_by_length(config.activations.packed_attention, hf_config, device, precision)
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    if on_gpu:
        hf_config = _without_attention_dropout(hf_config)
    with torch.device("meta"):  # adapters move themselves to their layer's device, which fake tensors cannot follow
        model = build_empty(hf_config, dtype, nullcontext())
        wrapped = _prepared(model, config)
    if config.activations.loss == "fused":
        check_fused_loss(device, precision, model)
    trace, work = _followed(wrapped, model, config, device=device, packed=packed, masked=packed and not by_length)
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
        whole=sum(shape[dimension] for shape in matrices for dimension in KINDS[config.algorithm].whole_state.values()),
        largest_matrix=max((shape.numel() for shape in matrices), default=0),
        multiplied=_multiplied(model, wrapped),
        layers=layers,
        hidden=hidden,
        vocab=int(model.config.vocab_size),
        trace=trace,
        work=work,
        saved_inputs_bytes=layers * block_input if recomputed else 0,
    )


_followed_before: dict[tuple[str, ...], tuple[Trace, Work]] = {}
"""What was followed last, by what it depends on: advice tries many places for the states of one and the same micro-batch."""
_MOST_REMEMBERED = 16


def _followed(
    wrapped: nn.Module, model: PreTrainedModel, config: TuneConfig, *, device: str, packed: bool, masked: bool
) -> tuple[Trace, Work]:
    """What ``follow`` tells of a micro-batch; one that was followed a short while ago is not followed again."""
    where = ("zero", "offload", "save", "batch")  # where states lie, and how many micro-batches there are
    sections = {field.name: getattr(config, field.name) for field in fields(config) if field.name not in where}
    built = model.config.to_json_string(use_diff=False)
    key = tuple(map(str, (sections, config.batch.micro, built, model.dtype, device, packed, masked)))
    if key not in _followed_before:
        while len(_followed_before) >= _MOST_REMEMBERED:
            _followed_before.pop(next(iter(_followed_before)))
        whole_logits = config.activations.loss_rows == 0
        _followed_before[key] = follow(
            wrapped, model, config, device=device, packed=packed, masked=masked, whole_logits=whole_logits
        )
    return _followed_before[key]


def packing_of(config: TuneConfig) -> str:
    """``join``, ``isolate`` or ``none``; of data that is not there to be looked at, what its names let expect."""
    data = config.data
    if data.packing != "auto":
        return data.packing
    try:
        return find_inputs(config).packing
    except (FinetuneError, OSError):
        named = any((source.format or data.format) not in ("auto", "text") for source in data.sources("train"))
        return "isolate" if named else "join"


def _without_attention_dropout(hf_config: PretrainedConfig) -> PretrainedConfig:
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


def _multiplied(model: PreTrainedModel, wrapped: nn.Module) -> int:
    """Elements of weights that take part in products: lookups do not, unless the table is the output layer too."""
    tables = {id(m.weight): m.weight.numel() for m in model.modules() if isinstance(m, nn.Embedding)}
    head = head_of(model)
    if head is not None:
        tables.pop(id(head.weight), None)
    return sum(p.numel() for p in wrapped.parameters() if p.ndim >= 2 and id(p) not in tables)
