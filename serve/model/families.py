"""What Tessera must know of each architecture: where tensor parallelism cuts it, and how its attention is reached.

The model definitions are transformers'. One row of ``FAMILIES`` per ``model_type``; a new family is a new row, and where it
takes more than that, a field of its row says what.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from serve.errors import ConfigError
from serve.model.heads import KEY, QUERY, VALUE, HeadCut

if TYPE_CHECKING:  # this table is also read where neither torch nor transformers shall be imported
    from transformers import PretrainedConfig

Rows = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture's facts.

    ``column`` and ``row`` name linear layers by the end of their module path. A column-parallel layer keeps some of its
    output features on each rank, a row-parallel one some of its input features; the ranks' products are summed after it. The
    first in ``row`` ends a layer's attention, the second its feed-forward part.
    """

    name: str
    column: tuple[str, ...]
    row: tuple[str, ...]
    rows: Rows = field(default_factory=dict)
    """What the output features of a layer in ``column`` are, part after part: heads of queries, keys or values. Layers whose
    features are whole heads, or whole key/value heads with all that belongs to each, need not be named. Other parameters that
    are cut by heads are named here, too: norms over all heads, sinks."""
    head_blocks: int = 1
    """Into how many blocks the heads fall that each have rows, and features of ``row``, of their own."""
    halves: tuple[str, ...] = ()
    """Column-parallel layers of two equal parts, gate and up, each of which is cut by itself."""
    parallel_residual: bool = False
    """A layer's attention and its feed-forward part, computed in this order, are both added to the layer's input."""
    conv1d: bool = False
    """Linear layers are transformers' ``Conv1D``: stored as [in, out]."""
    activated: tuple[str, str] = ("", "")
    """The linear layer of the feed-forward part that an activation follows at once, and that activation's name beside it."""
    rotary_function: str = ""
    """What the attention's forward calls to turn queries and keys: (q, k, cosines, sines), halves of the features paired."""
    partial_rotary: bool = False
    """With ``rotary_function``: it may turn a part of each head."""
    other_angles: bool = False
    """With ``rotary_function``: its angles are in fp32, or told once for two features: the CPU kernels do not take them."""
    angles_told_once: bool = False
    """With ``other_angles``: they are told once."""
    turns_pairs: bool = False
    """With ``replaces_attn``: the module turns neighbouring features, by rows of its ``embed_positions``; for a back end that
    does so, ``serve.model.forwards`` has another forward."""
    attention: str = "self_attn"
    """End of the path of each layer's attention module."""
    replaces_attn: bool = False
    """The module computes attention in its own ``_attn`` and does not go through transformers' attention interface."""
    replaces_forward: bool = False
    """The module computes attention inside its ``forward``: ``serve.model.forwards`` has another one."""
    scaled: bool = True
    """With ``replaces_attn`` or ``replaces_forward``: whether scores are divided by the square root of the head size."""
    alibi: bool = False
    """Scores have a bias that grows with the key's position."""
    sinks: bool = False
    """Each head has one more score in its softmax, the module's ``sinks``."""
    norms_over_heads: tuple[str, ...] = ()
    """Norms of the attention module that run over the features of all heads: over the ranks, too."""
    norms_by_head: tuple[str, ...] = ()
    """Modules of the attention module that have a norm for each head, in a list ``norms``."""
    local_config: bool = False
    """The attention's forward reads its numbers of heads from its ``config``."""
    recomputes_long: bool = False
    """With ``longrope``: a sequence that grows beyond the first length is computed again from its first token."""
    experts: str = ""
    """End of the path of a layer's experts, stacked in parameters whose first dimension counts them; "" where are none."""
    expert_cuts: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    """Which dimension of a stack the ranks share, and what lies in it: ``PLAIN``, ``HALVES`` (gate, then up) or ``PAIRS`` (gate
    and up in turn)."""
    expert_biases: tuple[str, ...] = ()
    """Stacks that are added after the ranks' shares are summed: one rank's alone."""
    expert_tensors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By stack, the stored tensors of each expert, whose rows lie one after the other in it; others are stored stacked."""
    stored_as: tuple[str, str] = ("", "")
    """A part of parameters' names, and what checkpoints have instead of it."""
    scaled_embedding: bool = False
    """The input embedding multiplies its rows by the square root of their width."""


PLAIN: Final = "plain"
HALVES: Final = "halves"
PAIRS: Final = "pairs"

_SEPARATE: Final[Rows] = {"q_proj": (QUERY,), "k_proj": (KEY,), "v_proj": (VALUE,)}
_JOINED: Final = (QUERY, KEY, VALUE)
_ROTARY: Final = "apply_rotary_pos_emb"
_MLP: Final = ("gate_proj", "up_proj")


def _like_llama(name: str, **more: Any) -> Family:
    facts: dict[str, Any] = {
        "column": (*_SEPARATE, *_MLP),
        "row": ("o_proj", "down_proj"),
        "rows": _SEPARATE,
        "activated": ("mlp.gate_proj", "act_fn"),
        "rotary_function": _ROTARY,
    }
    return Family(name=name, **(facts | more))


FAMILIES: Final[Mapping[str, Family]] = {
    family.name: family
    for family in (
        # Rows of query_key_value are [head, (q, k, v), head_dim]: a plain cut by heads keeps each head's triple together.
        Family(
            name="gpt_neox",
            column=("query_key_value", "dense_h_to_4h"),
            row=("attention.dense", "dense_4h_to_h"),
            attention="attention",
            activated=("mlp.dense_h_to_4h", "act"),
            rotary_function=_ROTARY,
            partial_rotary=True,
        ),
        Family(
            name="gpt2",
            column=("attn.c_attn", "mlp.c_fc"),
            row=("attn.c_proj", "mlp.c_proj"),
            rows={"attn.c_attn": _JOINED},
            conv1d=True,
            activated=("mlp.c_fc", "act"),
            attention="attn",
        ),
        # With one key/value head, rows of c_attn are [q | k | v]; without, [head, (q, k, v), head_dim]: see ``as_configured``.
        Family(
            name="gpt_bigcode",
            column=("attn.c_attn", "mlp.c_fc"),
            row=("attn.c_proj", "mlp.c_proj"),
            rows={"attn.c_attn": _JOINED},
            activated=("mlp.c_fc", "act"),
            attention="attn",
        ),
        Family(
            name="gptj",
            parallel_residual=True,
            column=(*_SEPARATE, "mlp.fc_in"),
            row=("out_proj", "mlp.fc_out"),
            rows=_SEPARATE,
            activated=("mlp.fc_in", "act"),
            attention="attn",
            replaces_attn=True,
            turns_pairs=True,
        ),
        Family(
            name="codegen",
            parallel_residual=True,
            column=("qkv_proj", "mlp.fc_in"),
            row=("attn.out_proj", "mlp.fc_out"),
            rows={"qkv_proj": (QUERY, VALUE, KEY) * 4},
            head_blocks=4,
            activated=("mlp.fc_in", "act"),
            attention="attn",
            replaces_attn=True,
            turns_pairs=True,
        ),
        Family(
            name="gpt_neo",
            column=(*_SEPARATE, "mlp.c_fc"),
            row=("out_proj", "mlp.c_proj"),
            rows=_SEPARATE,
            activated=("mlp.c_fc", "act"),
            attention="attn.attention",
            replaces_attn=True,
            scaled=False,
        ),
        Family(
            name="opt", column=(*_SEPARATE, "fc1"), row=("out_proj", "fc2"), rows=_SEPARATE, activated=("fc1", "activation_fn")
        ),
        *(_like_llama(name) for name in ("llama", "mistral", "qwen2", "qwen3")),
        # The angles' cosines stay fp32 in a bf16 model.
        _like_llama(
            "olmo2",
            other_angles=True,
            rows={**_SEPARATE, "q_norm": (QUERY,), "k_norm": (KEY,)},
            norms_over_heads=("q_norm", "k_norm"),
        ),
        _like_llama("stablelm", partial_rotary=True, norms_by_head=("q_layernorm", "k_layernorm")),
        _like_llama("gemma2", scaled_embedding=True),
        _like_llama(
            "mixtral",
            column=tuple(_SEPARATE),
            row=("o_proj",),
            activated=("", ""),
            experts="mlp.experts",
            expert_cuts={"gate_up_proj": (1, HALVES), "down_proj": (2, PLAIN)},
            expert_tensors={"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)},
            stored_as=(".mlp.", ".block_sparse_moe."),
        ),
        _like_llama(
            "gpt_oss",
            other_angles=True,
            angles_told_once=True,
            column=tuple(_SEPARATE),
            row=("o_proj",),
            rows={**_SEPARATE, "sinks": (QUERY,)},
            activated=("", ""),
            sinks=True,
            experts="mlp.experts",
            expert_cuts={
                "gate_up_proj": (2, PAIRS),
                "gate_up_proj_bias": (1, PAIRS),
                "down_proj": (1, PLAIN),
            },
            expert_biases=("down_proj_bias",),
        ),
        Family(
            name="phi",
            parallel_residual=True,
            column=(*_SEPARATE, "mlp.fc1"),
            row=("self_attn.dense", "mlp.fc2"),
            rows=_SEPARATE,
            activated=("mlp.fc1", "activation_fn"),
            rotary_function=_ROTARY,
            partial_rotary=True,
        ),
        Family(
            name="phi3",
            column=("qkv_proj", "gate_up_proj"),
            row=("o_proj", "down_proj"),
            rows={"qkv_proj": _JOINED},
            halves=("gate_up_proj",),
            rotary_function=_ROTARY,
            partial_rotary=True,
            local_config=True,
            recomputes_long=True,
        ),
        Family(
            name="bloom",
            column=("query_key_value", "dense_h_to_4h"),
            row=("self_attention.dense", "dense_4h_to_h"),
            attention="self_attention",
            activated=("mlp.dense_h_to_4h", "gelu_impl"),
            replaces_forward=True,
            alibi=True,
        ),
        # Rows of query_key_value are [q | k | v] with one key/value head, else [key/value head, (its q, k, v), head_dim].
        Family(
            name="falcon",
            column=("query_key_value", "dense_h_to_4h"),
            row=("self_attention.dense", "dense_4h_to_h"),
            rows={"query_key_value": _JOINED},
            attention="self_attention",
            activated=("mlp.dense_h_to_4h", "act"),
            replaces_forward=True,
        ),
    )
}


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a checkpoint's ``config.json``, before anything is known of its numbers.

    Raises:
        ConfigError: the architecture is not one that Tessera serves.
    """
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise ConfigError(f"config.json: model_type is {model_type!r}; Tessera serves {', '.join(sorted(FAMILIES))}")
    return FAMILIES[str(model_type)]


def as_configured(family: Family, config: PretrainedConfig) -> Family:
    """The row of a family whose layers are laid out by a switch of its configuration, as that switch is set."""
    if family.name in ("gpt_bigcode", "falcon") and not _one_shared_head(config):
        family = replace(family, rows={})
    if family.name == "falcon":
        is_parallel = config.parallel_attn or config.new_decoder_architecture
        family = replace(family, alibi=bool(config.alibi), parallel_residual=bool(is_parallel))
    if family.name in ("gpt_neox", "stablelm"):
        family = replace(family, parallel_residual=bool(config.use_parallel_residual))
    return family


def _one_shared_head(config: PretrainedConfig) -> bool:
    return bool(getattr(config, "multi_query", False)) and not getattr(config, "new_decoder_architecture", False)


def key_value_heads(config: PretrainedConfig) -> int:
    """Key/value heads of the whole model; families without grouped queries have as many as query heads."""
    if _one_shared_head(config):
        return 1
    if config.model_type == "falcon":
        return int(config.num_kv_heads if config.new_decoder_architecture else config.num_attention_heads)
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def head_cut(config: PretrainedConfig, size: int) -> HeadCut:
    """How ``size`` ranks share the heads of this model."""
    return HeadCut(query=int(config.num_attention_heads), shared=key_value_heads(config), size=size)


def head_dim(config: PretrainedConfig) -> int:
    """Features of one head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def attention_window(config: PretrainedConfig, layer: int) -> int:
    """Positions a GPT-Neo layer sees, itself included; 0 for all. Other families pass their window with each call."""
    kinds = getattr(config, "attention_layers", None)
    return int(config.window_size) if kinds is not None and kinds[layer] == "local" else 0
