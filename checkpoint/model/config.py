"""What ``config.json`` and ``generation_config.json`` must say before anything is built from them.

Libraries take nearly any value and fail later, in a load or a request. Every number, id and switch that is used is checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NoReturn

from checkpoint.errors import CheckpointError, shown
from checkpoint.model.quantised import method_said

CONFIG = "config.json"
GENERATION = "generation_config.json"
CODE_NAMED = "auto_map"
"""The key by which a folder names code of its own that would build the model. Nothing of a checkpoint is ever run."""

NOTHING_KNOWN: Mapping[str, Any] = MappingProxyType({})
"""The configuration of a model of which nothing is known."""

MAX_POSITIONS = 1 << 24
_MAX_SIZE = 1 << 31
_MAX_LAYERS = 1 << 14

_OWN_FAMILIES = frozenset(
    ("gpt_neox", "gpt2", "gptj", "gpt_neo", "opt", "llama", "mistral", "qwen2", "phi", "qwen3", "stablelm", "olmo2", "phi3",
     "codegen", "gpt_bigcode", "falcon", "bloom", "gemma2", "mixtral", "gpt_oss")
)  # fmt: skip
"""Model types whose every key is known here. Others, which can only be trained, may use a name for something else: of theirs
only single numbers are checked."""

_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "num_heads")
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx")
_WIDTHS = ("hidden_size", "n_embd")
_KEY_VALUE_HEADS = ("num_key_value_heads",)

_COUNTS: Mapping[str, int] = {
    **dict.fromkeys(("vocab_size", *_WIDTHS, *_HEADS, *_KEY_VALUE_HEADS), _MAX_SIZE),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "word_embed_proj_dim", "head_dim", "rotary_dim"), _MAX_SIZE),
    **dict.fromkeys(("sliding_window", "window_size", "pretraining_tp"), _MAX_SIZE),
    **dict.fromkeys(("num_kv_heads", "n_embed", "ffn_hidden_size", "num_local_experts", "num_experts_per_tok"), _MAX_SIZE),
    **dict.fromkeys(("query_pre_attn_scalar", "num_ln_in_parallel_attn"), _MAX_SIZE),
    "original_max_position_embeddings": MAX_POSITIONS,
    **dict.fromkeys(_LAYERS, _MAX_LAYERS),
    **dict.fromkeys(_POSITIONS, MAX_POSITIONS),
}
"""Integers from 1 up to this."""

_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon")
_THETAS = ("rope_theta", "rotary_emb_base")
_SHARES = ("partial_rotary_factor", "rotary_pct")
_DROPOUTS = (
    "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "resid_dropout", "embed_dropout",
    "dropout", "activation_dropout", "layerdrop",
)  # fmt: skip
_DEVIATIONS = ("initializer_range", "init_std")
_SWITCHES = (
    "tie_word_embeddings", "use_cache", "use_parallel_residual", "attention_bias", "mlp_bias", "qk_layernorm",
    "use_sliding_window", "scale_attn_weights", "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn",
    "add_cross_attention", "is_decoder", "is_encoder_decoder", "do_layer_norm_before", "_remove_final_layer_norm",
    "enable_bias", "layer_norm_elementwise_affine", "multi_query", "new_decoder_architecture", "alibi", "parallel_attn", "bias",
    "use_qkv_bias", "apply_residual_connection_post_layernorm", "slow_but_exact", "attention_softmax_in_fp32",
    "scale_attention_softmax_in_fp32",
)  # fmt: skip
_TEXTS = ("hidden_act", "activation_function", "activation", "hidden_activation")
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping", "swiglu_alpha", "swiglu_limit")
_DTYPE_KEYS = ("dtype", "torch_dtype")
_DTYPES = ("auto", "float64", "float32", "float16", "bfloat16")

_NULLABLE = frozenset(
    ("num_key_value_heads", "n_inner", "head_dim", "rotary_dim", "sliding_window", "n_ctx", "intermediate_size", "window_size",
     "pretraining_tp", "rope_theta", "rotary_emb_base", "partial_rotary_factor", "rotary_pct", "num_kv_heads",
     "ffn_hidden_size", "num_ln_in_parallel_attn", "hidden_activation", "attn_logit_softcapping", "final_logit_softcapping")
)  # fmt: skip
"""Keys that may be ``null``, which stands for the family's own default."""

_UNSAID = frozenset((*_DROPOUTS, *_DEVIATIONS, "use_cache"))
"""Keys whose ``null`` says nothing: older files have it, and the library of today refuses it."""

_OF_NO_MODEL = ("_implementation", "num_labels", "id2label", "label2id")
_OF_CALLS = ("return_dict", "use_return_dict", "output_attentions", "output_hidden_states", "torchscript")
"""Parts of names of keys, and keys, that say nothing of a causal language model: by what code its library is to compute it and
what its calls give, which is for whoever computes, and labels, of which the library makes as many as there are to be."""

_FALSE_IF_NULL = frozenset(("tie_word_embeddings",))
"""Keys whose ``null`` was no different from ``false`` to the library that wrote it, and is refused by that of today."""

_ROPE_NUMBERS: Mapping[str, tuple[float, float]] = {
    "rope_theta": (0.0, math.inf),
    "factor": (0.0, 1e6),
    "low_freq_factor": (0.0, 1e6),
    "high_freq_factor": (0.0, 1e6),
    "attention_factor": (0.0, 1e6),
    "beta_fast": (0.0, 1e6),
    "beta_slow": (0.0, 1e6),
    "mscale": (0.0, 1e6),
    "mscale_all_dim": (0.0, 1e6),
}
"""Bounds of numbers in ``rope_parameters`` and ``rope_scaling``: more than the first, at most the second."""

_MULTI_QUERY = frozenset(("gpt_bigcode", "falcon"))
"""Families with one key/value head, unless ``multi_query`` is false or Falcon's ``new_decoder_architecture`` true."""

_WITHOUT_PADDING_ROW = frozenset(("gpt_neox", "gpt2", "gptj", "gpt_neo", "codegen", "gpt_bigcode", "falcon", "bloom"))
"""Families whose embedding has no padding row. Of the others ``pad_token_id`` is one, which the model is built with."""

_OTHER_HEADS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice")
"""Ends of names of models that give no tokens; their weights may fit a language model all the same."""

_IDS = ("eos_token_id", "bos_token_id", "pad_token_id")


def check_config(config: Mapping[str, Any]) -> None:
    """Refuse a ``config.json`` that names no model type, is of a family that only its own code would build, is of quantised
    weights, or has a value of the wrong type or out of its range among those that are used.

    Folders of families known here may name code, too: many are older than the family in transformers. It is not needed, and
    not run.

    Raises:
        CheckpointError: names the key, its value and the rule.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise CheckpointError(CONFIG, f"model_type is {shown(model_type)}; it must name the model's family")
    own = model_type in _OWN_FAMILIES
    if CODE_NAMED in config and not own:
        rule = f"has {CODE_NAMED}, which names code to be run from the checkpoint; that is never done, and model_type"
        raise CheckpointError(CONFIG, f"{rule} {shown(model_type)} is no family that is served, which would not need it")
    named = config.get("architectures")
    other = next((name for name in named if str(name).endswith(_OTHER_HEADS)), None) if isinstance(named, list) else None
    if other is not None:
        raise CheckpointError(CONFIG, f"architectures names {shown(other)}; causal language models are read, no others")
    method = method_said(config)
    if method is not None:
        rule = f"says that the weights are quantised, by {method}; quantised weights are not supported"
        raise CheckpointError(CONFIG, f"{rule}: use the model they were made from")
    for key, value in config.items():
        if key not in _RULES:
            continue
        if not own:
            _foreign(key, value)
        elif value is not None or key not in _NULLABLE | _UNSAID | _FALSE_IF_NULL:
            _RULES[key](key, value)
    _check_ids(CONFIG, config, _MAX_SIZE)
    if own:
        _check_dtype(config)
        _check_rope(config)
        _check_proportions(config)
        _check_layer_kinds(config)
        _check_layer_types(config)


def normalized(config: Mapping[str, Any]) -> dict[str, Any]:
    """A checked ``config.json`` as the libraries of today take it: without what is no model's; of the families known here
    without names of code, without the ``null`` of keys that then have the family's default or are false, with ``torch.float16``
    as ``float16`` and one id that begins a text."""
    kept = {
        key: value for key, value in config.items() if key not in _OF_CALLS and not any(part in key for part in _OF_NO_MODEL)
    }
    if config["model_type"] not in _OWN_FAMILIES:
        return kept
    kept = {key: value for key, value in kept.items() if key != CODE_NAMED and (value is not None or key not in _UNSAID)}
    kept |= {key: False for key in _FALSE_IF_NULL & kept.keys() if kept[key] is None}
    kept |= {key: kept[key].removeprefix("torch.") for key in _DTYPE_KEYS if isinstance(kept.get(key), str)}
    return with_one_beginning(kept)


def with_one_beginning(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with at most one ``bos_token_id``: the first of a list, and ``None`` for a list of none."""
    begins = values.get("bos_token_id")
    return dict(values) | ({"bos_token_id": begins[0] if begins else None} if isinstance(begins, list) else {})


def check_generation_config(generation: Mapping[str, Any]) -> None:
    """Refuse a ``generation_config.json`` whose token ids are no ids.

    Raises:
        CheckpointError: names the key, its value and the rule.
    """
    _check_ids(GENERATION, generation, _MAX_SIZE)


def check_vocabulary(config: Mapping[str, Any], generation: Mapping[str, Any]) -> None:
    """Refuse token ids that the model has no row for: requests are computed with them.

    The id that fills up is used by no request; only where it is the embedding's padding row must there be such a row.

    Apart from ``check_config``, because what was saved with such an id can still be read, only not be used.

    Raises:
        CheckpointError: names the file, the key, its value and the rule.
    """
    rows = config.get("vocab_size")
    if type(rows) is int:
        for file, values in ((GENERATION, generation), (CONFIG, config)):
            _check_ids(file, {**values, "pad_token_id": None}, rows, f", for vocab_size is {rows}")
        if config.get("model_type") not in _WITHOUT_PADDING_ROW:
            filling = {"pad_token_id": config.get("pad_token_id")}
            _check_ids(CONFIG, filling, rows, f", for it is the embedding's padding row and vocab_size is {rows}")


def attention_heads(config: Mapping[str, Any]) -> int | None:
    """Query heads that a checked ``config.json`` gives; ``None`` where it leaves them to the family's default."""
    return _number(config, _HEADS)


def key_value_heads(config: Mapping[str, Any]) -> int | None:
    """Key/value heads that a checked ``config.json`` gives; as many as query heads where it does not say."""
    if config.get("model_type") in _MULTI_QUERY:
        if config.get("new_decoder_architecture"):
            return _number(config, ("num_kv_heads", *_HEADS))
        return 1 if config.get("multi_query", True) else attention_heads(config)
    return _number(config, (*_KEY_VALUE_HEADS, *_HEADS))


def positions(config: Mapping[str, Any]) -> int | None:
    """Positions that a checked ``config.json`` gives."""
    return _number(config, _POSITIONS)


def layers(config: Mapping[str, Any]) -> int | None:
    """Layers that a checked ``config.json`` gives."""
    return _number(config, _LAYERS)


def _number(config: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    """The value under the first of the names that the families have for one thing."""
    return next((config[key] for key in keys if type(config.get(key)) is int), None)


def _refuse(key: str, value: object, rule: str, file: str = CONFIG) -> NoReturn:
    raise CheckpointError(file, f"{key} is {shown(value)}; it must be {rule}")


def _is_number(value: object) -> bool:
    # An integer of JSON may be too large for a float, which isfinite would need.
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e300 < value < 1e300


def _foreign(key: str, value: Any) -> None:
    """Refuse an impossible number under another family's key; nothing else is known of such keys."""
    highest = _COUNTS.get(key, math.inf)
    if isinstance(value, int | float) and not (isinstance(value, bool) or (_is_number(value) and 0 <= value <= highest)):
        _refuse(key, value, f"a finite number, 0 or more{f' and at most {highest}' if key in _COUNTS else ''}")


def _count(key: str, value: object) -> None:
    highest = _COUNTS[key]
    if type(value) is not int or not 1 <= value <= highest:
        _refuse(key, value, f"an integer from 1 to {highest}")


def _epsilon(key: str, value: Any) -> None:
    if not _is_number(value) or not 0 < value <= 1:
        _refuse(key, value, "a number greater than 0 and at most 1")


def _theta(key: str, value: Any) -> None:
    if not _is_number(value) or value <= 0:
        _refuse(key, value, "a finite number greater than 0")


def _share(key: str, value: Any) -> None:
    if not _is_number(value) or not 0 <= value <= 1:
        _refuse(key, value, "a number from 0 to 1")


def _deviation(key: str, value: Any) -> None:
    if not _is_number(value) or value < 0:
        _refuse(key, value, "a finite number, 0 or more")


def _switch(key: str, value: object) -> None:
    if not isinstance(value, bool):
        _refuse(key, value, "true or false")


def _text(key: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        _refuse(key, value, "a name")


_RULES: Mapping[str, Callable[[str, Any], None]] = {
    **dict.fromkeys(_COUNTS, _count),
    **dict.fromkeys(_EPSILONS, _epsilon),
    **dict.fromkeys((*_THETAS, *_CAPS), _theta),
    **dict.fromkeys((*_SHARES, *_DROPOUTS), _share),
    **dict.fromkeys(_DEVIATIONS, _deviation),
    **dict.fromkeys(_SWITCHES, _switch),
    **dict.fromkeys(_TEXTS, _text),
}


def _check_dtype(config: Mapping[str, Any]) -> None:
    for key in _DTYPE_KEYS:
        value = config.get(key)
        if value is not None and (not isinstance(value, str) or value.removeprefix("torch.") not in _DTYPES):
            _refuse(key, value, f"one of {', '.join(_DTYPES)}")


def _check_ids(file: str, values: Mapping[str, Any], limit: int, why: str = "") -> None:
    """Token ids are ids below ``limit``. Those that do not end a sequence may also be -1, by which older files say that there
    is none."""
    for key in _IDS:
        value = values.get(key)
        lowest = 0 if key == "eos_token_id" else -1
        several = key != "pad_token_id"
        ids = value if isinstance(value, list) and several else [] if value is None else [value]
        for item in ids:
            if type(item) is not int or not lowest <= item < limit:
                kinds = "an id, or a list of ids," if several else "an id"
                _refuse(key, value, f"{kinds} from {lowest} to {limit - 1}{why}", file)


def _check_rope(config: Mapping[str, Any]) -> None:
    """Numbers of the rotary embedding, under its name of today and the one of older files."""
    for where in ("rope_parameters", "rope_scaling"):
        rope = config.get(where)
        if rope is None:
            continue
        if not isinstance(rope, dict):
            _refuse(where, rope, "an object or null")
        for key, (above, most) in _ROPE_NUMBERS.items():
            value = rope.get(key)
            if value is not None and (not _is_number(value) or not above < value <= most):
                _refuse(f"{where}.{key}", value, f"a finite number greater than {above:g}, at most {most:g}")
        share, original = rope.get("partial_rotary_factor"), rope.get("original_max_position_embeddings")
        if share is not None:
            _share(f"{where}.partial_rotary_factor", share)
        if original is not None and (type(original) is not int or not 1 <= original <= MAX_POSITIONS):
            _refuse(f"{where}.original_max_position_embeddings", original, f"an integer from 1 to {MAX_POSITIONS}")
        for key in ("rope_type", "type"):
            if rope.get(key) is not None and not isinstance(rope[key], str):
                _refuse(f"{where}.{key}", rope[key], "a name")
        _check_factors(where, rope)


def _check_factors(where: str, rope: Mapping[str, Any]) -> None:
    """The numbers by which longrope turns each pair of a head's entries more slowly, within the first length and beyond it."""
    needed = "longrope" in (rope.get("rope_type"), rope.get("type"))
    for key in ("short_factor", "long_factor"):
        factors = rope.get(key)
        if factors is None and not needed:
            continue
        if not isinstance(factors, list) or not factors or not all(_is_number(item) and item > 0 for item in factors):
            _refuse(f"{where}.{key}", factors, "a list of finite numbers greater than 0" + " for longrope" * needed)


def _check_proportions(config: Mapping[str, Any]) -> None:
    """Numbers that must divide each other, where the file gives both."""
    heads, shared, width = attention_heads(config), key_value_heads(config), _number(config, _WIDTHS)
    if heads is not None and shared is not None and heads % shared:
        _refuse("num_key_value_heads", shared, f"a divisor of the {heads} query heads")
    if heads is not None and width is not None and config.get("head_dim") is None and width % heads:
        raise CheckpointError(CONFIG, f"hidden_size is {width}; it must be a multiple of the {heads} query heads")


def _check_layer_kinds(config: Mapping[str, Any]) -> None:
    """GPT-Neo's list of [kinds, repetitions], which transformers multiplies out before it looks at it."""
    kinds = config.get("attention_types")
    if kinds is None:
        return
    num_layers, total = layers(config), 0
    if not isinstance(kinds, list):
        _refuse("attention_types", kinds, "a list of [kinds, repetitions]")
    for entry in kinds:
        names, times = entry if isinstance(entry, list) and len(entry) == 2 else ([], None)
        known = isinstance(names, list) and bool(names) and all(name in ("global", "local") for name in names)
        if not known or type(times) is not int or not 1 <= times <= _MAX_LAYERS:
            _refuse("attention_types", kinds, f'a list of [["global" or "local", ...], repetitions from 1 to {_MAX_LAYERS}]')
        total += len(names) * times
    if num_layers is not None and total != num_layers:
        raise CheckpointError(CONFIG, f"attention_types are of {total} layers; num_layers is {num_layers}")


def _check_layer_types(config: Mapping[str, Any]) -> None:
    """A name for each layer: which of them see all earlier positions, and which a window of them."""
    kinds = config.get("layer_types")
    if kinds is None:
        return
    if not isinstance(kinds, list) or any(kind not in ("full_attention", "sliding_attention") for kind in kinds):
        _refuse("layer_types", kinds, 'a list of "full_attention" and "sliding_attention"')
    num_layers = layers(config)
    if num_layers is not None and len(kinds) != num_layers:
        raise CheckpointError(CONFIG, f"layer_types are of {len(kinds)} layers; num_hidden_layers is {num_layers}")
