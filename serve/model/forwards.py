"""Forwards of attention modules that compute attention in the middle of their own ``forward``, and their tables of biases.

Those of GPT-J and CodeGen are for back ends that turn queries and keys.

Shapes: see ``serve.model.attention``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.models.bloom import modeling_bloom
from transformers.models.falcon import modeling_falcon

from serve.model.attention import PagedAttention, Rotary
from serve.model.heads import Piece

Forward = Callable[..., tuple[Tensor, None]]
"""Called as the module is; its output layer's result, and ``None`` for the weights that transformers would give."""


def _bloom(module: nn.Module, attention: PagedAttention, scale: float) -> Forward:
    """BLOOM: [head, (q, k, v)] in one projection; adds the residual itself."""

    def forward(hidden_states: Tensor, residual: Tensor, **_: object) -> tuple[Tensor, None]:
        query_1HTD, key_1HTD, value_1HTD = module._reshape(module.query_key_value(hidden_states))  # type: ignore[operator]  # a layer of this family
        out_1THD = attention(query_1HTD, key_1HTD, value_1HTD, scale, 0)
        return module.dense(out_1THD.flatten(2)) + residual, None  # type: ignore[operator]  # a layer of this family

    return forward


def _falcon(module: nn.Module, attention: PagedAttention, scale: float) -> Forward:
    """Falcon, all three layouts of its projection; positions by angles or by a bias."""
    width = int(module.head_dim)  # type: ignore[arg-type]  # a number in this family
    per_group = int(module.num_heads) // int(module.num_kv_heads)  # type: ignore[arg-type]  # a number in this family
    joined = bool(module.multi_query) and not module.new_decoder_architecture

    def forward(
        hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor] | None = None, **_: object
    ) -> tuple[Tensor, None]:
        fused_1TX: Tensor = module.query_key_value(hidden_states)  # type: ignore[operator]  # a layer of this family
        groups = 1 if joined else fused_1TX.shape[2] // ((per_group + 2) * width)
        fused_1TGND = fused_1TX.view(1, fused_1TX.shape[1], groups, per_group + 2, width)
        query_1HTD = fused_1TGND[..., :-2, :].flatten(2, 3).transpose(1, 2)
        key_1GTD, value_1GTD = (fused_1TGND[..., place, :].transpose(1, 2) for place in (-2, -1))
        if attention.rules.bias_HL is None:
            assert position_embeddings is not None
            turn = attention.state.postpone_rotary if attention.backend.rotates else modeling_falcon.apply_rotary_pos_emb
            query_1HTD, key_1GTD = turn(query_1HTD, key_1GTD, *position_embeddings)
        out_1THD = attention(query_1HTD, key_1GTD, value_1GTD, scale, 0)
        return module.dense(out_1THD.flatten(2)), None  # type: ignore[operator]  # a layer of this family

    return forward


def _gptj(module: nn.Module, attention: PagedAttention, scale: float) -> Forward:
    """GPT-J, which turns pairs by angles in the model's type, where the back end does that."""

    def forward(hidden_states: Tensor, position_ids: Tensor | None = None, **_: object) -> tuple[Tensor, None]:
        parts = [project(hidden_states) for project in (module.q_proj, module.k_proj, module.v_proj)]  # type: ignore[operator]  # layers of this family
        query_1HTD, key_1HTD, value_1HTD = (part.unflatten(2, (-1, module.head_dim)).transpose(1, 2) for part in parts)
        attention.state.rotary = _pairs(module, position_ids, hidden_states.dtype)
        out_1THD = attention(query_1HTD, key_1HTD, value_1HTD, scale, 0)
        return module.out_proj(out_1THD.flatten(2)), None  # type: ignore[operator]  # a layer of this family

    return forward


_CODEGEN_BLOCKS: Final = 4
"""Blocks of heads that CodeGen's projection has, each with its queries, values and keys one behind the other."""


def _codegen(module: nn.Module, attention: PagedAttention, scale: float) -> Forward:
    """CodeGen, which turns pairs by angles in fp32, where the back end does that."""

    def forward(hidden_states: Tensor, position_ids: Tensor | None = None, **_: object) -> tuple[Tensor, None]:
        fused_1TNX = module.qkv_proj(hidden_states).unflatten(2, (_CODEGEN_BLOCKS, -1))  # type: ignore[operator]  # a layer of this family
        query_1HTD, value_1HTD, key_1HTD = (
            part.flatten(2).unflatten(2, (-1, module.head_dim)).transpose(1, 2) for part in fused_1TNX.chunk(3, dim=3)
        )
        attention.state.rotary = _pairs(module, position_ids, torch.float32)
        out_1THD = attention(query_1HTD, key_1HTD, value_1HTD, scale, 0)
        return module.out_proj(out_1THD.flatten(2)), None  # type: ignore[operator]  # a layer of this family

    return forward


def _pairs(module: nn.Module, position_ids: Tensor | None, dtype: torch.dtype) -> Rotary:
    """What turns neighbours: a row of ``embed_positions`` has each pair's sine, then each pair's cosine."""
    assert position_ids is not None, "the model hands its positions on"
    sines_TR = nn.functional.embedding(position_ids[0], module.get_buffer("embed_positions")).to(dtype)
    sines, cosines = sines_TR.chunk(2, dim=1)
    return Rotary(cosines, sines, sines_TR.shape[1], pairs=True)


_FORWARDS: Final[dict[str, Callable[[nn.Module, PagedAttention, float], Forward]]] = {
    "bloom": _bloom,
    "codegen": _codegen,
    "falcon": _falcon,
    "gptj": _gptj,
}


def forward_of(family: str, module: nn.Module, attention: PagedAttention, scale: float) -> Forward:
    """Another forward for one attention module of a family that ``replaces_forward``, or that ``turns_pairs``."""
    return _FORWARDS[family](module, attention, scale)


def alibi_table(config: PretrainedConfig, heads: Piece, positions: int, scale: float, device: torch.device) -> Tensor:
    """What ALiBi (Press et al. 2021) adds to scores: fp32 [heads of this rank, positions].

    The slopes are those of the whole model's heads. A bias that grows with the key's position differs from one that shrinks
    with its distance by a number of each query alone, which the softmax does not see.

    BLOOM's is computed in fp32, where transformers rounds it to the model's type. Falcon's is rounded to bf16 in every
    type, and scaled like the scores, as its models were trained with.
    """
    ones = torch.ones(1, positions, dtype=torch.int64)
    total = int(config.num_attention_heads)
    if config.model_type == "bloom":
        table = modeling_bloom.build_alibi_tensor(ones, total, torch.float32)
    else:
        table = modeling_falcon.build_alibi_tensor(ones, total, torch.float32) * scale
    return table.view(total, positions)[heads.begin : heads.end].to(device, torch.float32).contiguous()
