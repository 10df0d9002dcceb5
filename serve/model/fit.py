"""Whether a checkpoint can be served with these options, as far as its files' headers and configuration tell. No torch."""

from __future__ import annotations

from checkpoint import Given, Structure
from checkpoint.errors import CheckpointError
from checkpoint.model.config import attention_heads, key_value_heads, layers, positions
from serve.config import ModelConfig
from serve.errors import ConfigError
from serve.model.checks import check_dtype, check_max_model_len, check_quantization, extended_positions
from serve.model.families import family_of
from serve.model.heads import check_pipeline_parallel, check_tensor_parallel

_CONFIG = "config.json"


def given_of(model: ModelConfig) -> Given:
    """What the options say of the checkpoint that its files leave open."""
    return Given(
        config=model.config or None,
        tokenizer=model.tokenizer or None,
        neox_qkv_layout=model.neox_qkv_layout,
        prefix=model.weights_prefix,
        base=model.base or None,
        adapter=model.adapter or None,
        any_base=model.base_changed == "accept",
        adapter_config=model.adapter_config or None,
        master_weights=model.master_weights,
        layer_map=model.layer_map or None,
    )


def check_fit(model: ModelConfig, structure: Structure) -> None:
    """Refuse what no rank would load, before there is a rank. What only the built model tells is left to the ranks.

    Raises:
        ConfigError: the family is not served, or an option does not fit the model.
        CheckpointError: ``config.json`` describes a model that cannot be that of the weights.
    """
    config = structure.config
    family = family_of(config)
    structure.check_model()
    heads, shared, limit = attention_heads(config), key_value_heads(config), positions(config)
    if heads is not None and shared is not None:
        check_tensor_parallel(heads, shared, model.tensor_parallel_size, multiple=family.head_blocks)
    if (depth := layers(config)) is not None:
        check_pipeline_parallel(depth, model.pipeline_parallel_size)
    if limit is not None:
        check_max_model_len(model.max_model_len, limit, extended_positions(limit, config))
    check_dtype(str(config.get("dtype") or config.get("torch_dtype")) if model.dtype == "auto" else model.dtype, model.device)
    check_quantization(model.quantization, model.device)
    if model.verify == "sha256" and structure.manifest is None:
        raise ConfigError("model.verify is sha256; the checkpoint has no manifest.json to compare with")


def check_rows(structure: Structure, largest_id: int) -> None:
    """Refuse a tokenizer that makes ids the embedding has no row for.

    Raises:
        CheckpointError: that.
    """
    rows = structure.config.get("vocab_size")
    if isinstance(rows, int) and largest_id >= rows:
        rule = f"vocab_size is {rows}, so ids go up to {rows - 1}; the tokenizer makes ids up to {largest_id}"
        raise CheckpointError(_CONFIG, rule)
