"""Which model of transformers the arguments of a Megatron run describe, if any; its checkpoints keep them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, NoReturn

from checkpoint.errors import CheckpointError, shown
from checkpoint.readers.files.pickles import NUMPY_ARRAYS, Allowed
from checkpoint.readers.files.stand_ins import Bag, Table

ALLOWED = Allowed(
    classes=frozenset(
        (
            "__builtin__.set",
            "__builtin__.bytearray",
            "builtins.set",
            "builtins.bytearray",
            "_io.BytesIO",
            "argparse.Namespace",
            "types.SimpleNamespace",
            "pathlib.PosixPath",
            "pathlib._local.PosixPath",
            "signal.Signals",
            "numpy.dtypes.UInt32DType",
            "torch.device",
            "torch.Tensor",
            "torch._C.Generator",
            "torch._tensor._rebuild_from_type_v2",
        )
    )
    | NUMPY_ARRAYS,
    packages=frozenset(("megatron", "deepspeed", "transformer_engine")),
    calls={
        "collections.defaultdict": lambda *_: Table(),
        # By which Python 3.11 first wrote values of enumerations; nothing is fetched.
        "__builtin__.getattr": lambda *_: None,
        "builtins.getattr": lambda *_: None,
    },
)
"""What stands beside the weights: arguments, to which users add what they like, states of random numbers and of optimizers."""

_NONE_LIKE = "no model of transformers that is read here is built so"
_UNLIKE: Mapping[str, str] = {
    "qk_layernorm": "queries and keys are normalised",
    "apply_layernorm_1p": "norms are stored less one",
    "rotary_interleaved": "rotary positions turn neighbours",
    "multi_latent_attention": "attention is latent",
    "attention_output_gate": "attention has a gate",
    "apply_residual_connection_post_layernorm": "residuals begin behind the norms",
    "hybrid_layer_pattern": "layers are of several kinds",
    "hybrid_override_pattern": "layers are of several kinds",
    "heterogeneous_layers_config_path": "layers are of several kinds",
    "window_size": "attention has a window",
    "mtp_num_layers": "it predicts several tokens",
    "quick_geglu": "its activation is another",
    "use_mup": "its activations are scaled by muP",
    "num_unique_layers": "layers share weights",
    "rotary_seq_len_interpolation_factor": "rotary positions are interpolated",
    "no_rope_freq": "some layers have no positions",
    "softmax_scale": "scores have a scale of their own",
    "layernorm_zero_centered_gamma": "norms are stored less one",
    "qk_l2_norm": "queries and keys are normalised",
    "activation_func_clamp_value": "its activation is another",
    "glu_linear_offset": "its activation is another",
    "linear_attention_freq": "layers are of several kinds",
    "experimental_attention_variant": "attention is another",
    "enable_mhc_connections": "layers have several residuals",
}
_LAYERS_OF_ITS_OWN: Final = "megatron.core.models.gpt."
"""What the first word of ``spec`` begins with where layers are those of the trainer itself."""
_EPSILONS = ("norm_epsilon", "layernorm_epsilon")


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of the run, and the file they are in."""

    values: Mapping[str, Any]
    file: str

    def refuse(self, key: str, rule: str) -> NoReturn:
        """Raise what is said of an argument's value."""
        raise CheckpointError(self.file, f"args.{key} is {shown(self.values.get(key))}; {rule}")

    def count(self, *keys: str, default: int | None = None) -> int:
        """A number from 1 up, under the first of ``keys`` that has one."""
        for key in keys:
            value = self.values.get(key)
            if value is None:
                continue
            if type(value) is not int or not 1 <= value < 1 << 31:
                self.refuse(key, "it must be a number from 1 up")
            return value
        if default is None:
            self.refuse(keys[0], "a number from 1 up must be given")
        return default

    def number(self, *keys: str, default: float) -> float:
        """A finite number above 0, under the first of ``keys`` that has one."""
        for key in keys:
            value = self.values.get(key)
            if value is None:
                continue
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e300:
                self.refuse(key, "it must be a finite number above 0")
            return float(value)
        return default

    def share(self, key: str) -> float:
        """A number from 0 to 1, 0 where there is none."""
        value = self.values.get(key)
        if value is None:
            return 0.0
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
            self.refuse(key, "it must be a number from 0 to 1")
        return float(value)

    def switch(self, key: str, default: bool = False) -> bool:
        """Whether the argument is true; ``default`` where it is not there or ``None``."""
        value = self.values.get(key)
        return default if value is None else bool(value)


def arguments(tree: Mapping[Any, Any], file: str) -> Arguments:
    """The arguments in a file of a rank.

    Raises:
        CheckpointError: there are none.
    """
    bag = tree.get("args")
    if not isinstance(bag, Bag) or not isinstance(bag.state, dict):
        raise CheckpointError(file, "holds no args, which say what model it is of")
    return Arguments(bag.state, file)


@dataclass(frozen=True, slots=True)
class Shape:
    """What taking the tensors apart needs to know of a model."""

    family: str
    num_layers: int
    num_heads: int
    num_groups: int
    """Key/value heads."""
    head_size: int
    gated: bool
    tied: bool
    has_thirds: bool = False
    """Whether a rank's queries, keys and values lie apart, all of one kind together; else those of each group do."""


def shape_of(args: Arguments) -> Shape:
    """The model that the arguments describe.

    Raises:
        CheckpointError: transformers has none like it; it names the argument.
    """
    for key, why in _UNLIKE.items():
        if args.values.get(key):
            args.refuse(key, f"{why}: {_NONE_LIKE}")
    if args.values.get("softmax_type") not in (None, "vanilla"):
        args.refuse("softmax_type", f"attention may attend to nothing: {_NONE_LIKE}")
    spec = args.values.get("spec")
    if spec and not (isinstance(spec, list | tuple) and str(spec[0]).startswith(_LAYERS_OF_ITS_OWN)):
        args.refuse("spec", f"layers are of a specification of the run's own: {_NONE_LIKE}")
    experts = args.values.get("num_experts")
    if experts is not None and experts != 1 and experts != [1]:
        args.refuse("num_experts", "mixtures of experts are not read")
    heads = args.count("num_attention_heads")
    groups = args.count("num_key_value_heads", default=heads)
    if args.switch("group_query_attention"):
        groups = args.count("num_query_groups")
    hidden, gated = args.count("hidden_size"), args.switch("swiglu")
    size = args.count("kv_channels", default=max(1, hidden // heads))
    family = _family(args, heads == groups, gated, size * heads == hidden)
    tied = not args.switch("untie_embeddings_and_output_weights")
    return Shape(family, args.count("num_layers"), heads, groups, size, gated, tied)


def shape_of_deepspeed(args: Arguments) -> Shape:
    """The model that the arguments of Megatron-DeepSpeed describe.

    Its code of December 2024 and later (676a482c, which added ``ds_sequence_parallel_fpdt``) keeps a rank's queries, then its
    keys, then its values; it has the same version and shapes as before.

    Raises:
        CheckpointError: as ``shape_of``; or that later code computes what no model does.
    """
    shape, added = shape_of(args), "ds_sequence_parallel_fpdt"
    if added not in args.values:
        return shape
    if shape.num_groups != shape.num_heads:
        args.refuse("num_key_value_heads", f"with {added}, which it has, its trainer computes no shared keys and values")
    if _positions(args)[0]:
        by_sequence = args.count("ds_sequence_parallel_size", default=1) > 1 or args.switch("force_ds_sequence_parallel")
        if not by_sequence or not any(args.values.get(key) for key in args.values if key.startswith("use_flash_attn")):
            args.refuse(
                "use_rotary_position_embeddings",
                f"with {added}, which it has, its trainer turns by the cosine and the sine of a cosine, or not at all, but for "
                f"sequence parallelism with flash attention: {_NONE_LIKE}",
            )
    return replace(shape, has_thirds=True)


def config_of(
    args: Arguments, shape: Shape, *, rows: int, dtype: str | None, end_of_text_id: int | None, is_core: bool
) -> dict[str, Any]:
    """The ``config.json`` of the model.

    Args:
        rows: of the embedding.
        dtype: of the weights, by the name transformers has for it.
        is_core: whether it is a model of Megatron's core, which passes over some arguments.

    Raises:
        CheckpointError: an argument is missing or out of its range.
    """
    hidden = args.count("hidden_size")
    wide = args.count("ffn_hidden_size", default=4 * hidden)
    positions, epsilon = args.count("max_position_embeddings", "seq_length"), args.number(*_EPSILONS, default=1e-5)
    common: dict[str, Any] = {
        "model_type": shape.family,
        "vocab_size": rows,
        "tie_word_embeddings": shape.tied,
        "bos_token_id": end_of_text_id,
        "eos_token_id": end_of_text_id,
        "pad_token_id": None,
        **({"dtype": dtype} if dtype else {}),
    }
    if shape.family == "gpt2":
        return (
            common
            | _gpt2(args, shape, (hidden, wide), _activation(args, is_core))
            | {"n_positions": positions, "layer_norm_epsilon": epsilon}
        )
    common |= {
        "hidden_size": hidden,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "intermediate_size": wide,
        "max_position_embeddings": positions,
        "hidden_act": "silu" if shape.gated else _activation(args, is_core),
        "attention_dropout": args.share("attention_dropout"),
    }
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": args.number("rotary_base", "rope_theta", default=10000)}
    if shape.family == "gpt_neox":
        return common | {
            "layer_norm_eps": epsilon,
            "use_parallel_residual": False,
            "attention_bias": True,
            "hidden_dropout": args.share("hidden_dropout"),
            "rope_parameters": rope | {"partial_rotary_factor": args.number("rotary_percent", default=1.0)},
        }
    if args.switch("use_rope_scaling"):
        # Whatever rope_scaling_factor says: the trainer does not pass it on to the model.
        rope |= {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope["original_max_position_embeddings"] = 8192
    common |= {"num_key_value_heads": shape.num_groups, "head_dim": shape.head_size, "rms_norm_eps": epsilon}
    biased = _biased(args)
    return (
        common | {"rope_parameters": rope} | ({"attention_bias": biased, "mlp_bias": biased} if shape.family == "llama" else {})
    )


def _gpt2(args: Arguments, shape: Shape, widths: tuple[int, int], activation: str) -> dict[str, Any]:
    """The names that GPT-2's configuration has; ``widths``: of the hidden states and of the MLP."""
    hidden, wide = widths
    return {
        "n_embd": hidden,
        "n_layer": shape.num_layers,
        "n_head": shape.num_heads,
        "n_inner": wide,
        "activation_function": activation,
        "attn_pdrop": args.share("attention_dropout"),
        "resid_pdrop": args.share("hidden_dropout"),
        "embd_pdrop": args.share("hidden_dropout"),
    }


def _family(args: Arguments, own_keys: bool, gated: bool, plain_heads: bool) -> str:
    norm = str(args.values.get("normalization") or "LayerNorm").lower()
    rotary, learned = _positions(args)
    biased = _biased(args)
    if rotary == learned or norm not in ("layernorm", "rmsnorm"):
        key = "normalization" if rotary != learned else "position_embedding_type"
        args.refuse(key, f"{_NONE_LIKE}; layernorm and rmsnorm, rotary and learned positions are read")
    if norm == "rmsnorm" and rotary and gated and args.number("rotary_percent", default=1.0) == 1.0:
        return "qwen2" if args.switch("add_qkv_bias") and not biased else "llama"
    if norm == "rmsnorm" and rotary and gated:
        args.refuse("rotary_percent", f"rotary positions for a part of each head with rmsnorm: {_NONE_LIKE}")
    told = f"{'rotary' if rotary else 'learned'} positions and {'a gated' if gated else 'a plain'} MLP"
    if norm == "rmsnorm" or gated:
        args.refuse("normalization", f"with {told}: {_NONE_LIKE}")
    for fits, key in (
        (biased, "add_bias_linear"),
        (own_keys, "num_query_groups" if args.switch("group_query_attention") else "num_key_value_heads"),
        (plain_heads, "kv_channels"),
        (not args.switch("use_rope_scaling"), "use_rope_scaling"),
    ):
        if not fits:
            args.refuse(key, f"with layernorm, {told}: {_NONE_LIKE}")
    return "gpt_neox" if rotary else "gpt2"


def _positions(args: Arguments) -> tuple[bool, bool]:
    """Whether positions are rotary, and whether they are learned."""
    kind = args.values.get("position_embedding_type")
    if args.switch("use_rotary_position_embeddings"):
        return True, False
    if kind is None:
        return False, args.switch("add_position_embedding", True)
    return kind == "rope", kind == "learned_absolute" or (kind == "absolute")


def _biased(args: Arguments) -> bool:
    return args.switch("add_bias_linear", not args.switch("disable_bias_linear"))


def _activation(args: Arguments, is_core: bool) -> str:
    if args.switch("squared_relu"):
        return "relu2"
    if args.switch("openai_gelu") and not is_core:
        return "gelu_new"
    if args.switch("bias_gelu_fusion"):
        return "gelu_fast"  # the fused one is the form by tanh
    for key in ("use_te_activation_func", "use_transformer_engine_op_fuser"):
        if args.switch(key):
            args.refuse(key, "TransformerEngine's GELU has not been compared with any of transformers")
    return "gelu"
