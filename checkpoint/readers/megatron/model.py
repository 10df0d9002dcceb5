"""A Megatron model's tensors, of any of the names they have had, put together of the parts of tensor-parallel ranks."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from checkpoint.disk.folder import Folder
from checkpoint.errors import CheckpointError
from checkpoint.layout import Stored
from checkpoint.readers.decoder import Decoder, Layer, Rows, Tensors, named
from checkpoint.readers.megatron.args import Arguments, Shape, config_of
from checkpoint.readers.ranks import Part, Ranks, by_columns, by_rows, cut, divided, dtype_name, one_copy
from checkpoint.readers.weights import Weights
from checkpoint.text.vocabulary import id_of, tokenizer_vocab_size

Table = Mapping[str, Part]
MIN_VERSION = 2.0
"""The least version of a checkpoint: since then the rows of queries, keys and values alternate by group."""

_LAYER = re.compile(r"(?:encoder|transformer|decoder)\.layers\.(\d{1,6})\.(.+)")
_FINAL = re.compile(r"(?:encoder|transformer|decoder)\.final_(?:layer)?norm\.(.+)")
_EMBEDDING = re.compile(r"embedding\.((?:word|position)_embeddings\.weight)")
_PACKED = ("self_attention.linear_qkv", "self_attention.query_key_value", "attention.query_key_value")
_HEADS = ("output_layer.weight", "word_embeddings_for_head.weight")
_MOST, _LONGEST = 1 << 20, 1 << 10
_ENDS = ("<|endoftext|>", "</s>")
TOKENIZER = "tokenizer"
"""The folder of an iteration that Megatron saves the tokenizer in."""
_PASSED_OVER = ("_extra_state", "rotary_pos_emb.inv_freq", "rotary_emb.inv_freq")


@dataclasses.dataclass(slots=True)
class Parts:
    """What one rank has of a stage or of the whole model, apart."""

    embedding: dict[str, Part] = dataclasses.field(default_factory=dict)
    layers: dict[int, dict[str, Part]] = dataclasses.field(default_factory=dict)
    norm: dict[str, Part] = dataclasses.field(default_factory=dict)
    head: dict[str, Part] = dataclasses.field(default_factory=dict)


def flat(table: object, file: str) -> dict[str, object]:
    """Tables in tables as one, names joined by dots; what is no weight is left out.

    Raises:
        CheckpointError: a name is no text, or there are very many.
    """
    found: dict[str, object] = {}
    waiting: list[tuple[str, object]] = [("", table)]
    looked_at = 0
    while waiting:
        prefix, inner = waiting.pop()
        if not isinstance(inner, Mapping):
            raise CheckpointError(file, f"holds {type(inner).__name__} where a table of tensors must stand")
        looked_at += 1 + len(inner)
        if looked_at > _MOST or len(prefix) > _LONGEST:
            raise CheckpointError(file, f"has tables in tables of more than {_MOST} names, or very deep ones")
        for name, value in inner.items():
            if not isinstance(name, str):
                raise CheckpointError(file, f"has {name!r} where the name of a tensor must stand")
            if name.endswith(_PASSED_OVER):
                continue
            if isinstance(value, dict):
                waiting.append((f"{prefix}{name}.", value))
            else:
                found[prefix + name] = value
    return found


def apart(table: Table, file: str) -> Parts:
    """A stage's tensors by where they belong.

    Raises:
        CheckpointError: one belongs nowhere.
    """
    parts = Parts()
    for name, part in table.items():
        plain = name.removeprefix("module.").removeprefix("language_model.")
        if match := _LAYER.fullmatch(plain):
            parts.layers.setdefault(int(match[1]), {})[match[2]] = part
        elif match := _FINAL.fullmatch(plain):
            parts.norm[match[1]] = part
        elif match := _EMBEDDING.fullmatch(plain):
            parts.embedding[match[1]] = part
        elif plain in _HEADS:
            parts.head["weight"] = part
        else:
            raise CheckpointError(file, f"holds tensor {name!r}, which is not known of Megatron's GPT models")
    return parts


def check_version(tree: Mapping[object, object], file: str) -> None:
    """Refuse an order of queries, keys and values that is not read.

    Raises:
        CheckpointError: the checkpoint is older than the one that is.
    """
    version = tree.get("checkpoint_version", 0)
    if not isinstance(version, int | float) or version < MIN_VERSION:
        rule = f"its checkpoint_version is {version}; from {MIN_VERSION} on they are read; Megatron saves older ones anew"
        raise CheckpointError(file, rule)


def weights_of(
    ranks: Sequence[Parts], args: Arguments, shape: Shape, descriptors: dict[str, int], tokenizer: Folder, step: int | None
) -> Weights:
    """The weights of a model whose tensor-parallel ranks have ``ranks``.

    Raises:
        CheckpointError: a tensor is missing, unknown, or of another form than the arguments say.
    """
    numbers = set().union(*(rank.layers for rank in ranks))
    if shape.num_layers > len(numbers) or numbers != set(range(shape.num_layers)):
        rule = f"there are tensors of {len(numbers)} layers; args.num_layers is {shape.num_layers}"
        raise CheckpointError(args.file, rule)
    for rank in ranks:
        for number in numbers - rank.layers.keys():
            raise CheckpointError(args.file, f"a rank has no tensors of layer {number}, which others have")
    is_core = any(name.startswith("self_attention.linear_qkv.") for name in ranks[0].layers[0])
    model = _decoder(ranks, args, shape)
    return named_weights(model, args, shape, len(ranks), descriptors, tokenizer, step, is_core=is_core)


def named_weights(
    model: Decoder,
    args: Arguments,
    shape: Shape,
    num_ranks: int,
    descriptors: dict[str, int],
    tokenizer: Folder,
    step: int | None,
    *,
    is_core: bool = True,
) -> Weights:
    """The weights of a whole model, by the names of transformers, without the rows that fill up the vocabulary.

    Args:
        num_ranks: tensor-parallel ones of the training.
        is_core: whether it is a model of Megatron's core, and none of those before.

    Raises:
        CheckpointError: the arguments leave out what is needed.
    """
    tokens, multiple = tokenizer_vocab_size(tokenizer), args.count("make_vocab_size_divisible_by", default=128) * num_ranks
    rows = model.embedding.shape[0]
    if tokens is not None and 0 < tokens[1] < rows and -(-tokens[1] // multiple) * multiple == rows:
        rows = tokens[1]
        head = None if model.head is None else model.head.rows(0, rows)
        model = dataclasses.replace(model, embedding=model.embedding.rows(0, rows), head=head)
    ends = (id_of(tokenizer, token) for token in _ENDS)
    end = next((found for found in ends if found is not None and found < rows), None)
    dtype = dtype_name(model.embedding)
    config = config_of(args, shape, rows=rows, dtype=dtype, end_of_text_id=end, is_core=is_core)
    stages = args.count("pipeline_model_parallel_size", default=1)
    facts = {"tensor_parallel_size": num_ranks, "pipeline_parallel_size": stages, "layers": shape.num_layers}
    places = named(model, shape.family)
    return Weights(descriptors, places, args.file, config=config, step=step, facts=facts, tokenizer=tokenizer)


def tokenizer_names(args: Arguments) -> dict[str, str]:
    """The tokenizer's files by the usual names; of paths only the last part, for they are of another machine."""
    kind = args.values.get("tokenizer_type")
    keys = {"vocab.json": "vocab_file", "merges.txt": "merge_file"} if kind == "GPT2BPETokenizer" else {}
    paths = {name: args.values.get(key) for name, key in keys.items()}
    found = {name: path.rsplit("/", 1)[-1] for name, path in paths.items() if isinstance(path, str)}
    return found if len(found) == len(keys) else {}


def _decoder(ranks: Sequence[Parts], args: Arguments, shape: Shape) -> Decoder:
    embedding = Ranks(args.file, [rank.embedding for rank in ranks])
    positions = embedding.find("position_embeddings.weight") if shape.family == "gpt2" else None
    words = by_rows(embedding.take("word_embeddings.weight"), "word_embeddings.weight")
    embedding.check_all_taken()
    norm = Ranks(args.file, [rank.norm for rank in ranks])
    final = {kind: one_copy(parts, "final norm") for kind in ("weight", "bias") if (parts := norm.find(kind)) is not None}
    norm.check_all_taken()
    heads = Ranks(args.file, [rank.head for rank in ranks])
    head = None if shape.tied else by_rows(heads.take("weight"), "output_layer.weight")
    layers = (Ranks(args.file, [rank.layers[number] for rank in ranks]) for number in range(shape.num_layers))
    return Decoder(
        embedding=words,
        positions=None if positions is None else one_copy(positions, "position_embeddings.weight"),
        layers=tuple(_layer(layer, shape) for layer in layers),
        norm=final,
        head=head,
    )


def _layer(ranks: Ranks, shape: Shape) -> Layer:
    heads = {}
    for kind in ("weight", "bias"):
        names = (
            f"self_attention.linear_qkv.{kind}",
            f"self_attention.query_key_value.{kind}",
            f"attention.query_key_value.{kind}",
        )
        parts = ranks.take(*names) if kind == "weight" else ranks.find(*names)
        if parts is not None:
            heads[kind] = _groups(parts, shape)
    norm = _norm(ranks, "input_layernorm.", "input_norm.", "self_attention.linear_qkv.layer_norm_")
    mlp_norm = _norm(
        ranks, "pre_mlp_layernorm.", "post_attention_layernorm.", "post_attention_norm.", "mlp.linear_fc1.layer_norm_"
    )
    up, gate = _up(ranks, shape)
    layer = Layer(
        norm=norm,
        mlp_norm=mlp_norm,
        query={kind: parts[0] for kind, parts in heads.items()},
        key={kind: parts[1] for kind, parts in heads.items()},
        value={kind: parts[2] for kind, parts in heads.items()},
        out=_row_parallel(ranks, "self_attention.linear_proj", "self_attention.dense", "attention.dense"),
        up=up,
        gate=gate,
        down=_row_parallel(ranks, "mlp.linear_fc2", "mlp.dense_4h_to_h"),
    )
    ranks.check_all_taken()
    return layer


def _groups(parts: list[Part], shape: Shape) -> tuple[list[Part], list[Part], list[Part]]:
    """Queries, keys and values; on each rank the rows are, of one group after the other, its queries, its key, its value, or
    those of all groups, one kind after the other.
    """
    what, size = "query_key_value", shape.head_size
    here = divided(shape.num_groups, len(parts), "key/value heads", parts[0][0])
    queries = divided(shape.num_heads, shape.num_groups, "heads", parts[0][0])
    rows = parts[0][1].shape[0] if parts[0][1].shape else 0
    if here * (queries + 2) * size != rows:
        rule = (
            f"{what}: has {rows} rows on a rank; {here} groups of {queries} queries, a key and a value of {size} are expected"
        )
        raise CheckpointError(parts[0][0], rule)
    sizes = [queries * size, size, size]
    each = [here * rows for rows in sizes] if shape.has_thirds else sizes * here
    cuts = [piece for part in parts for piece in cut(part, each, what)]
    return cuts[0::3], cuts[1::3], cuts[2::3]


def _up(ranks: Ranks, shape: Shape) -> tuple[Rows, Rows]:
    """The up-projection and the gate, which is above it on each rank."""
    packed: dict[str, list[Part]] = {}
    for kind in ("weight", "bias"):
        names = (f"mlp.linear_fc1.{kind}", f"mlp.dense_h_to_4h.{kind}")
        parts = ranks.take(*names) if kind == "weight" else ranks.find(*names)
        if parts is not None:
            packed[kind] = parts
    if not shape.gated:
        return packed, {}
    halves = {
        kind: [cut(part, [divided(part[1].shape[0], 2, "rows of the MLP", part[0])] * 2, "mlp.linear_fc1") for part in parts]
        for kind, parts in packed.items()
    }
    up = {kind: [pair[1] for pair in pairs] for kind, pairs in halves.items()}
    gate = {kind: [pair[0] for pair in pairs] for kind, pairs in halves.items()}
    return up, gate


def _row_parallel(ranks: Ranks, *names: str) -> Tensors:
    """A layer whose ranks each see a part of the input; its bias is added once, behind the sum."""
    found: dict[str, Stored] = {"weight": by_columns(ranks.take(*(f"{name}.weight" for name in names)), names[0])}
    bias = ranks.find(*(f"{name}.bias" for name in names))
    return found if bias is None else found | {"bias": one_copy(bias, f"{names[0]}.bias")}


def _norm(ranks: Ranks, *names: str) -> Tensors:
    found = {"weight": one_copy(ranks.take(*(f"{name}weight" for name in names)), names[0])}
    bias = ranks.find(*(f"{name}bias" for name in names))
    return found if bias is None else found | {"bias": one_copy(bias, names[0])}
