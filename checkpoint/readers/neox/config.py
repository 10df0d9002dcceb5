"""Which model of transformers a GPT-NeoX run's settings describe, if any."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from checkpoint.errors import CheckpointError
from checkpoint.readers.neox.settings import CONFIGS, Settings

_PLAIN: Mapping[str, str] = {"gelu": "gelu", "relu": "relu", "swish": "silu", "silu": "silu", "mish": "mish"}
_GATED: Mapping[str, str] = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu", "bilinear": "linear", "glu": "sigmoid"}
_LAYER_NORMS, _RMS_NORMS = ("layernorm", "te_layernorm"), ("rmsnorm", "te_rmsnorm")

_UNLIKE: Mapping[str, str] = {
    "use_qk_layernorm": "queries and keys are normalised",
    "use_mup": "its activations are scaled by muP",
    "te_mha": "attention is TransformerEngine's, whose tensors are kept otherwise",
    "te_fp8_mha": "attention is TransformerEngine's, whose tensors are kept otherwise",
    "te_layernorm_mlp": "the MLP is TransformerEngine's, whose tensors are kept otherwise",
}
"""Switches that, turned on, make a model that none of transformers is."""
_NONE_LIKE = "no model of transformers is built so"


@dataclass(frozen=True, slots=True)
class Sizes:
    """What only the tensors tell."""

    vocabulary: int
    """Rows of the embedding that are kept."""
    intermediate: int
    gated: bool
    dtype: str | None


@dataclass(frozen=True, slots=True)
class Shape:
    """What taking the tensors apart needs to know of a model."""

    family: str
    num_layers: int
    num_heads: int
    num_key_value_heads: int
    sums_biases: bool
    """Whether each rank adds its own copy of a row-parallel layer's bias, so that the bias is the sum of them."""
    has_one_norm: bool = False
    """Whether the norm before attention is the MLP's, too; the other one is in the files and not used."""


def shape_of(settings: Settings) -> Shape:
    """The model that the settings describe.

    Raises:
        CheckpointError: transformers has none like it; it names the key.
    """
    _check_blocks(settings)
    heads = settings.count("num_attention_heads")
    shared = settings.optional_count("num_kv_heads") or heads
    parallel = settings.switch("gpt_j_residual")
    return Shape(
        _family(settings, heads, shared),
        settings.count("num_layers"),
        heads,
        shared,
        sums_biases=parallel,
        has_one_norm=parallel and settings.switch("gpt_j_tied"),
    )


def check_ranks(settings: Settings) -> None:
    """Refuse what makes no one model where several model-parallel ranks trained it.

    Raises:
        CheckpointError: the ranks compute with different numbers, or add up more than they have; it names the key.
    """
    parallel = settings.switch("gpt_j_residual")
    biased = settings.switch("use_bias_in_attn_linear", True) or _mlp_biased(settings)
    if settings.switch("sequence_parallel") and biased and not parallel:
        settings.refuse(
            "sequence_parallel",
            "without gpt_j_residual each model-parallel rank trains the biases behind its sums apart and adds its own to its "
            "stretch of a text, so that its ranks are no one model",
        )
    if settings.switch("te_rowparallel") and parallel:
        settings.refuse(
            "te_rowparallel",
            f"with gpt_j_residual the sums of model-parallel ranks are added up twice, and {_NONE_LIKE}",
        )


def shape_from(config: Mapping[str, Any], file: str) -> Shape:
    """The model that a ``config.json`` describes, which was given in place of settings.

    Raises:
        CheckpointError: it is of a family that GPT-NeoX does not train, or leaves out what is needed.
    """
    family = config["model_type"]
    if family not in ("gpt_neox", "gpt2", "llama", "mistral"):
        raise CheckpointError(file, f"model_type is {family!r}; GPT-NeoX trains gpt_neox, gpt2, llama and mistral")
    names = ("n_layer", "n_head") if family == "gpt2" else ("num_hidden_layers", "num_attention_heads")
    counts = [config.get(name) for name in names]
    if not all(type(count) is int for count in counts):
        raise CheckpointError(file, f"must give {' and '.join(names)}")
    shared = config.get("num_key_value_heads") if family in ("llama", "mistral") else None
    summed = family == "gpt_neox" and config.get("use_parallel_residual", True) is not False
    return Shape(family, int(counts[0] or 0), int(counts[1] or 0), int(shared or counts[1] or 0), summed)


def config_of(settings: Settings, shape: Shape, sizes: Sizes, end_of_text_id: int | None) -> dict[str, Any]:
    """The ``config.json`` of the model.

    Raises:
        CheckpointError: transformers has none like it.
    """
    hidden = settings.count("hidden_size")
    seq_length = settings.optional_count("seq_length")
    common: dict[str, Any] = {
        "model_type": shape.family,
        "vocab_size": sizes.vocabulary,
        "tie_word_embeddings": not settings.switch("no_weight_tying"),
        "bos_token_id": end_of_text_id,
        "eos_token_id": end_of_text_id,
        "pad_token_id": None,
        **({"dtype": sizes.dtype} if sizes.dtype else {}),
    }
    activation = _activation(settings, shape, sizes.gated)
    positions = settings.count("max_position_embeddings", seq_length)
    if shape.family == "gpt2":
        return common | _gpt2(settings, shape, sizes, activation, positions)
    common |= {
        "attention_dropout": settings.share("attention_dropout"),
        "hidden_size": hidden,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "intermediate_size": sizes.intermediate,
        "max_position_embeddings": positions,
        "hidden_act": activation,
    }
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": settings.number("rotary_emb_base", 10000)}
    biased = settings.switch("use_bias_in_attn_linear", True)
    if shape.family == "gpt_neox":
        return common | {
            "layer_norm_eps": settings.number("layernorm_epsilon", 1e-5),
            "hidden_dropout": settings.share("hidden_dropout"),
            "use_parallel_residual": settings.switch("gpt_j_residual"),
            "attention_bias": biased,
            "rope_parameters": rope | {"partial_rotary_factor": settings.number("rotary_pct", 1.0)},
        }
    common |= {
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": hidden // shape.num_heads,
        "rms_norm_eps": settings.number("rms_norm_epsilon", 1e-8),
        "rope_parameters": rope,
    }
    if shape.family == "llama":
        return common | {"attention_bias": biased, "mlp_bias": _mlp_biased(settings)}
    # Its trainer lets a token see this many before it; transformers counts the token itself.
    return common | {"sliding_window": settings.count("sliding_window_width") + 1}


def _gpt2(settings: Settings, shape: Shape, sizes: Sizes, activation: str, positions: int) -> dict[str, Any]:
    """The names that GPT-2's configuration has."""
    return {
        "n_embd": settings.count("hidden_size"),
        "n_layer": shape.num_layers,
        "n_head": shape.num_heads,
        "n_inner": sizes.intermediate,
        "n_positions": positions,
        "activation_function": activation,
        "layer_norm_epsilon": settings.number("layernorm_epsilon", 1e-5),
        "attn_pdrop": settings.share("attention_dropout"),
        "resid_pdrop": settings.share("hidden_dropout"),
        "embd_pdrop": settings.share("hidden_dropout"),
    }


def _check_blocks(settings: Settings) -> None:
    """Refuse parts that no model of transformers has."""
    for key, why in _UNLIKE.items():
        if settings.switch(key):
            settings.refuse(key, f"{why}, and {_NONE_LIKE}")
    if settings.text("train_impl", "normal") == "rm":
        settings.refuse("train_impl", "a reward model has no head that gives tokens")
    if (settings.optional_count("moe_num_experts") or 1) > 1:
        settings.refuse("moe_num_experts", "mixtures of experts are not read")
    if settings.text("pos_emb", "learned") == "learned" and settings.number("mup_rp_embedding_mult", 1.0) != 1.0:
        settings.refuse("mup_rp_embedding_mult", f"learned positions are scaled by it, with muP or without, and {_NONE_LIKE}")
    prompt = settings.values.get("soft_prompt_tuning")
    if isinstance(prompt, dict) and prompt.get("enabled"):
        settings.refuse("soft_prompt_tuning", f"{_NONE_LIKE}")
    if settings.text("pos_emb", "learned") == "learned" and settings.values.get("opt_pos_emb_offset"):
        settings.refuse("opt_pos_emb_offset", f"positions begin later, and {_NONE_LIKE} with its other parts")
    _check_attention(settings)


def _kinds_of_attention(settings: Settings) -> set[str]:
    """The kinds that layers have, and the words that say how many do."""
    given = settings.values.get("attention_config")
    nodes, kinds = [given], set()
    while nodes:
        node = nodes.pop()
        if isinstance(node, list):
            nodes += node
        elif isinstance(node, str):
            kinds.add(node)
    return kinds


def _check_attention(settings: Settings) -> None:
    if _kinds_of_attention(settings) - {"global", "flash", "all"}:
        settings.refuse("attention_config", "only global and flash attention, which are one thing, are read")


def _window(settings: Settings) -> int | None:
    """How many tokens before it a token sees; ``None`` for all. Attention that is not flash has it in the mask that a pipeline
    makes, and in no other; a fused softmax of 16 bits passes over that mask with some lengths and not with others.
    """
    window = settings.optional_count("sliding_window_width")
    kinds = _kinds_of_attention(settings) - {"all"}
    if window is None or kinds == {"flash"}:
        return window
    if settings.optional_whole("pipe_parallel_size"):
        if settings.switch("scaled_upper_triang_masked_softmax_fusion") and _has_16_bits(settings):
            settings.refuse("scaled_upper_triang_masked_softmax_fusion", "with a sliding window it sees all tokens at times")
        return window
    if "flash" in kinds:
        rule = "without a pipeline layers of flash attention have it and those of global attention do not"
        settings.refuse("sliding_window_width", f"{rule}: {_NONE_LIKE}")
    return None


def _has_16_bits(settings: Settings) -> bool:
    by_engine = [settings.values.get(key) for key in ("fp16", "bf16")]
    enabled = any(isinstance(each, dict) and each.get("enabled") for each in by_engine)
    return enabled or settings.text("precision") in ("fp16", "bfloat16")


def _family(settings: Settings, heads: int, shared: int) -> str:
    norm, positions = settings.text("norm", "layernorm"), settings.text("pos_emb", "learned")
    parallel, window = settings.switch("gpt_j_residual"), _window(settings)
    if norm not in (*_LAYER_NORMS, *_RMS_NORMS):
        settings.refuse("norm", f"{_NONE_LIKE}; layernorm and rmsnorm are read")
    if positions not in ("rotary", "learned"):
        settings.refuse("pos_emb", f"{_NONE_LIKE}; rotary and learned are read")
    if norm in _LAYER_NORMS:
        if shared != heads:
            settings.refuse("num_kv_heads", f"shared keys and values with {norm}: {_NONE_LIKE}")
        if window is not None:
            settings.refuse("sliding_window_width", f"a sliding window with {norm}: {_NONE_LIKE}")
        if not _mlp_biased(settings):
            settings.refuse("use_bias_in_mlp", f"an MLP without bias with {norm}: {_NONE_LIKE}")
        if positions == "rotary":
            return "gpt_neox"
        if parallel:
            settings.refuse("gpt_j_residual", f"parallel residuals with learned positions: {_NONE_LIKE}")
        if not settings.switch("use_bias_in_attn_linear", True):
            settings.refuse("use_bias_in_attn_linear", f"attention without bias with learned positions: {_NONE_LIKE}")
        return "gpt2"
    if parallel:
        settings.refuse("gpt_j_residual", f"parallel residuals with {norm}: {_NONE_LIKE}")
    if positions != "rotary":
        settings.refuse("pos_emb", f"learned positions with {norm}: {_NONE_LIKE}")
    if settings.number("rotary_pct", 1.0) != 1.0:
        settings.refuse("rotary_pct", f"rotary positions for a part of each head with {norm}: {_NONE_LIKE}")
    if window is None:
        return "llama"
    for key, biased in (
        ("use_bias_in_attn_linear", settings.switch("use_bias_in_attn_linear", True)),
        ("use_bias_in_mlp", _mlp_biased(settings)),
    ):
        if biased:
            settings.refuse(key, f"biases (which there are unless it is false) with a sliding window: {_NONE_LIKE}")
    return "mistral"


def _mlp_biased(settings: Settings) -> bool:
    """Whether the MLP's linear maps have biases; the older kind for llama never had."""
    return settings.switch("use_bias_in_mlp", True) and settings.text("mlp_type", "regular") != "llama"


def _activation(settings: Settings, shape: Shape, gated: bool) -> str:
    """The activation by the name transformers has for it; ``gated`` is what the shapes say."""
    name = settings.text("activation", "gelu")
    wanted = shape.family in ("llama", "mistral")
    if gated != wanted:
        has = "a gate" if gated else "no gate"
        settings.refuse("activation", f"the MLP has {has}, with norm {settings.text('norm', 'layernorm')}: {_NONE_LIKE}")
    if name == "gelu" and not gated and settings.switch("bias_gelu_fusion"):
        return "gelu_fast"  # its fused form is the one by tanh
    kinds = _GATED if gated and settings.text("mlp_type", "regular") != "llama" else _PLAIN
    if name not in kinds:
        settings.refuse("activation", f"{_NONE_LIKE}; {', '.join(kinds)} are read here")
    return kinds[name]


def missing_settings(table: str) -> CheckpointError:
    """What to say where neither settings nor a configuration are there."""
    rule = (
        f"there is no {CONFIGS}/ with the settings of its training, and no config.json, in its folder or above; give one "
        "(--model-config)"
    )
    return CheckpointError(table, rule)
