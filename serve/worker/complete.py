"""What a filled model still needs to serve: attention over blocks, sums over the ranks, and the last step of its logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from serve.model.attach import attach, register_interface
from serve.model.attention import PLAIN, Backend, LayerCache, PagedAttention, ScoreRules, StepState
from serve.model.experts import only_own, own_experts, stacked_experts
from serve.model.families import Family, attention_window, head_dim
from serve.model.forwards import alibi_table
from serve.model.heads import HeadCut
from serve.model.localise import attention_modules
from serve.model.pretrained import head_of
from serve.worker.parallel import Ranks


def page_attention(
    model: PreTrainedModel,
    family: Family,
    caches: list[LayerCache],
    backend: Backend,
    heads: HeadCut,
    rank: int,
    max_model_len: int,
    *,
    first_layer: int = 0,
) -> StepState:
    """Put paged attention into every layer. ``first_layer`` is the whole model's number of the first one that is here."""
    register_interface()
    config = model.config
    scale = head_dim(config) ** -0.5 if family.scaled else 1.0
    block_tokens, device = caches[0].values.shape[2], caches[0].values.device
    positions = -(-max_model_len // block_tokens) * block_tokens
    bias_HL = alibi_table(config, heads.query_heads(rank), positions, scale, device) if family.alibi else None
    state = StepState()
    modules = attention_modules(model, family)
    assert len(modules) == len(caches), f"{family.name}: {len(modules)} attention modules, {len(caches)} layers"
    for layer, (module, cache) in enumerate(zip(modules, caches, strict=True), first_layer):
        sinks_H = module.get_parameter("sinks").to(torch.float32, copy=True) if family.sinks else None
        rules = PLAIN if bias_HL is None and sinks_H is None else ScoreRules(sinks_H=sinks_H, bias_HL=bias_HL)
        attach(module, PagedAttention(cache, state, backend, attention_window(config, layer), rules), family, scale)
    return state


def sum_norms(model: PreTrainedModel, family: Family, heads: HeadCut, ranks: Ranks) -> None:
    """Let the norms that run over the features of all heads do so, where each rank has some of them."""
    if ranks.size == 1:
        return
    for module in attention_modules(model, family):
        for name in family.norms_over_heads:
            norm = module.get_submodule(name)
            own = norm.get_parameter("weight").shape[0]
            is_query = own == heads.query_heads(ranks.rank).width * head_dim(model.config)
            of_all = sum(_heads_of(heads, rank, is_query) for rank in range(ranks.size))
            norm.forward = _summed_norm(norm, own * of_all // _heads_of(heads, ranks.rank, is_query), ranks)


def _heads_of(heads: HeadCut, rank: int, is_query: bool) -> int:
    return (heads.query_heads(rank) if is_query else heads.shared_heads(rank)).width


def _summed_norm(norm: nn.Module, features: int, ranks: Ranks) -> Callable[[Tensor], Tensor]:
    """RMSNorm (Zhang and Sennrich 2019) whose mean is over ``features``, those of all ranks; repeated heads count each time."""
    epsilon = float(norm.variance_epsilon)  # type: ignore[arg-type]  # a number in every norm of this kind

    def forward(x: Tensor) -> Tensor:
        wide = x.float()
        squares = ranks.sum_(wide.square().sum(dim=-1, keepdim=True))
        weight = norm.get_parameter("weight")  # looked up each time: it may have been exchanged
        return (weight * (wide * torch.rsqrt(squares / features + epsilon))).to(x.dtype)

    return forward


def sum_embedding(model: PreTrainedModel, ranks: Ranks) -> None:
    """Let the rows of an embedding that is cut along the vocabulary travel as all activations do."""
    embedding = model.get_input_embeddings()
    if ranks.size == 1 or not hasattr(embedding, "vocab_start_index"):
        return
    assert embedding.embed_scale is None, "an embedding that scales its rows was made plain before it was cut"
    begin, end = int(embedding.vocab_start_index), int(embedding.vocab_end_index)

    def forward(ids: Tensor) -> Tensor:
        weight = embedding.get_parameter("weight")  # looked up each time: it may have been exchanged
        elsewhere = (ids < begin) | (ids >= end)
        rows = nn.functional.embedding((ids - begin).masked_fill_(elsewhere, 0), weight)
        return ranks.sum_(rows.masked_fill_(elsewhere.unsqueeze(-1), 0.0))

    embedding.forward = forward


def sum_experts(model: PreTrainedModel, family: Family, ranks: Ranks, *, whole: bool = False) -> None:
    """Sum what the ranks' shares of stacked experts give; those that were packed one by one sum by themselves.

    Args:
        whole: each rank has some of the experts, not a part of each.
    """
    modules = stacked_experts(model, family)
    # torch's product over groups of rows takes rows of whole 16 bytes alone, which a rank's share need not be.
    if any(size * stack.itemsize % 16 for module in modules for stack in module.parameters() for size in stack.shape[1:]):
        model.config._experts_implementation = "eager"
    if ranks.size == 1:
        return
    for module in modules:
        if whole:
            own = own_experts(cast(int, module.num_experts), ranks.size, ranks.rank)
            skips = model.config._experts_implementation != "eager"
            module.num_experts = own.width  # type: ignore[assignment]  # a number in every module of this kind
            module._is_expert_parallel = skips
            module.forward = _summed(only_own(module.forward, own, skips=skips), ranks)
            continue
        module.forward = _summed(module.forward, ranks)


def settle(model: PreTrainedModel, family: Family, ranks: Ranks, *, whole: bool = False) -> None:
    """Make what follows from a complete model's weights, in the memory where that is: again, once others took their places.

    These are attention's sinks in fp32 and, on all ranks but the first, zeros as the biases that follow a sum over the ranks.

    Args:
        whole: each rank has some of the experts, not a part of each.
    """
    for module in attention_modules(model, family) if family.sinks else ():
        attention = cast(PagedAttention, module.tessera_attention)
        assert attention.rules.sinks_H is not None, "page_attention made them"
        attention.rules.sinks_H.copy_(module.get_parameter("sinks"))
    for module in stacked_experts(model, family) if ranks.rank and not whole else ():
        for name in family.expert_biases:
            module.get_parameter(name).zero_()


def _summed(forward: Callable[..., Tensor], ranks: Ranks) -> Callable[..., Tensor]:
    def summed(*args: object, **options: object) -> Tensor:
        return ranks.sum_(forward(*args, **options))

    return summed


def plain_embedding(model: PreTrainedModel) -> None:
    """Put a plain embedding in the place of one that scales its rows, on ``meta``: only such a one can be cut."""
    scaled = model.get_input_embeddings()
    assert isinstance(scaled, nn.Embedding)
    plain = nn.Embedding(scaled.num_embeddings, scaled.embedding_dim, _weight=scaled.weight)
    plain.weight = scaled.weight
    model.set_input_embeddings(plain)


def scale_embedding(model: PreTrainedModel) -> None:
    """Multiply what the embedding gives by the square root of its width, rounded to the model's type as in training."""
    embedding = model.get_input_embeddings()
    look_up = embedding.forward
    # A number of the host's: a tensor of it would be sent to the device in every step.
    factor = float(torch.tensor(int(model.config.hidden_size) ** 0.5, dtype=embedding.get_parameter("weight").dtype))

    def forward(ids: Tensor) -> Tensor:
        rows: Tensor = look_up(ids)
        return rows * factor

    embedding.forward = forward


class CappedHead(nn.Module):
    """A head whose logits are kept within (-cap, cap)."""

    def __init__(self, head: nn.Module, cap: float) -> None:
        super().__init__()
        self.head = head
        self._cap = cap

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.head(hidden)
        return (logits / self._cap).tanh() * self._cap


def whole_head(model: PreTrainedModel) -> nn.Module:
    """Hidden states to logits, with what transformers' causal model does to each of them after the layer."""
    config: PretrainedConfig = model.config
    cap = getattr(config, "final_logit_softcapping", None)
    head = head_of(model)
    return head if cap is None else CappedHead(head, float(cap))
