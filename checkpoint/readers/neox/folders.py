"""Reads the checkpoints of GPT-NeoX: a file for each layer and model-parallel rank, or, without a pipeline, one for each rank.

Queries, keys and values are one tensor: of each head in turn, or, where heads share keys and values, in blocks on each rank.
Norms are on every rank and their average counts; biases behind a row-parallel layer are added up where every rank adds its own.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from checkpoint.disk.folder import Folder
from checkpoint.disk.latest import named_below
from checkpoint.errors import CheckpointError
from checkpoint.given import NOTHING_GIVEN, Given
from checkpoint.layout import Stored
from checkpoint.readers.decoder import Decoder, Layer, Rows, Tensors, named
from checkpoint.readers.files.pickles import NUMPY_ARRAYS, Allowed
from checkpoint.readers.files.torch_zip import Archive, table_names
from checkpoint.readers.neox.config import Shape, Sizes, check_ranks, config_of, missing_settings, shape_from, shape_of
from checkpoint.readers.neox.settings import CONFIGS, Settings, read_settings
from checkpoint.readers.neox.tokenizer import end_of_document, rows_with_tokens, tokenizer_of
from checkpoint.readers.ranks import (
    Part,
    Ranks,
    by_columns,
    by_rows,
    check_one_step,
    cut,
    divided,
    dtype_name,
    merged,
    one_copy,
    step_in,
    tensors_of,
)
from checkpoint.readers.surroundings import find_configs
from checkpoint.readers.weights import OpenFiles, Weights

NAME = "GPT-NeoX"
LOOKS_LIKE = "configs/ and layer_00-model_00-model_states.pt or mp_rank_00_model_states.pt; above it, latest"

_LAYER_FILE = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
_RANK_FILE = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_PARTITIONED = re.compile(r"zero_pp_rank_\d+_mp_rank_\d+_model_states\.pt")
_TAG = re.compile(r"global_step(\d+)")
_FIRST_LAYER = 2
"""Before it are the embedding and a function that has no file."""

ALLOWED = Allowed(
    classes=frozenset(
        (
            "__builtin__.set",
            "builtins.set",
            "torch.device",
            "torch.Tensor",
            "torch._tensor._rebuild_from_type_v2",
        )
    )
    | NUMPY_ARRAYS,
    packages=frozenset(("deepspeed", "megatron")),
)
"""What stands beside the weights in a rank's file: states of random numbers, loss scalers and the like."""


def recognises(folder: Folder) -> bool:
    """Whether the folder has the files of GPT-NeoX's layers, or of its ranks: by settings beside them, or by names in them."""
    names = folder.names()
    layers = {int(match[1]): match[0] for match in map(_LAYER_FILE.fullmatch, names) if match}
    ranks = [name for name in names if _RANK_FILE.fullmatch(name)]
    if layers:  # Megatron-DeepSpeed, which names its files alike, begins with 1; here that is a function, which has no file
        if 0 not in layers or _has_settings(folder):
            return 0 in layers
        return 1 not in layers and bool(table_names(folder, layers[0], b"word_embeddings.weight"))
    if ranks:
        return _has_settings(folder) or bool(table_names(folder, ranks[0], b"sequential.0.word_embeddings.weight"))
    return _has_settings(folder) and any(_PARTITIONED.fullmatch(name) for name in names)


def newest_below(folder: Folder) -> str | None:
    """What ``latest`` names, where that is a checkpoint of GPT-NeoX."""
    return named_below(folder, recognises)


def open_weights(folder: Folder, given: Given = NOTHING_GIVEN) -> Weights:
    """Open every file with weights, and prove that layers, ranks and settings agree.

    Raises:
        CheckpointError: a file is missing or broken; a tensor is missing, unknown or of another form; the settings describe a
            model that transformers does not have.
    """
    settings = read_settings(folder)
    with OpenFiles(folder) as files:
        layers, table = _tables(folder, files)
        configs = find_configs(folder, given, above=True)
        if settings is None and configs is None:
            settings = read_settings(folder, above=True)
        if settings is not None:
            shape = shape_of(settings)
        elif configs is not None:
            shape = shape_from(configs[0], given.config or "config.json")
        else:
            raise missing_settings(table)
        if settings is not None and len(layers[0]) > 1:
            check_ranks(settings)
        _check_sizes(settings, shape, layers, table)
        tokenizer = tokenizer_of(folder, given, settings)
        model = _decoder(layers, shape, given.neox_qkv_layout)
        width = model.layers[0].out["weight"].shape[1]
        if settings is not None and settings.count("hidden_size") != width:
            rule = f"attention has {width} columns on {len(layers[0])} model-parallel ranks; are files of ranks missing?"
            settings.refuse("hidden_size", rule)
        said = None if configs is None else configs[0].get("vocab_size")
        if not isinstance(said, int):
            said = rows_with_tokens(settings, tokenizer, model.embedding.shape[0], len(layers[0]))
        model = _without_padding(model, said)
        config = None if settings is None else _config(settings, shape, model, end_of_document(settings, tokenizer))
        tag = _TAG.fullmatch(folder.path.name)
        return Weights(
            files.descriptors,
            named(model, shape.family),
            table,
            config=config,
            step=int(tag[1]) if tag else None,
            facts={"model_parallel_size": len(layers[0]), "layers": shape.num_layers, **_told(settings), **_aged(layers)},
            tokenizer=tokenizer,
        )


def _has_settings(folder: Folder) -> bool:
    return (folder.path / CONFIGS).is_dir() and any(name.endswith((".yml", ".yaml")) for name in folder.below(CONFIGS).names())


def _told(settings: Settings | None) -> dict[str, Any]:
    """Over how many stages the run laid its layers, and where it had its tokenizer."""
    if settings is None:
        return {}
    stages = settings.values.get("pipe_parallel_size")
    told: dict[str, Any] = {"pipe_parallel_size": stages} if type(stages) is int and stages >= 0 else {}
    return told | {
        key: str(settings.values[key]) for key in ("tokenizer_type", "vocab_file", "merge_file") if settings.values.get(key)
    }


def _aged(layers: Tables) -> dict[str, str]:
    """What is known of a run by names and types that its trainer has given up: of 2023 and before, and until 2024."""
    first = layers.get(_FIRST_LAYER, [{}])[0]
    told = {}
    if any(name.endswith("rotary_emb.inv_freq") and tensor.dtype == "F16" for name, (_, tensor) in first.items()):
        told["rotary_frequencies"] = "rounded to float16 by GPT-NeoX of that time; computed in float32 here, as by transformers"
    if "mlp.w1.weight" in first:
        told["rms_norm_epsilon"] = "added behind the root by GPT-NeoX of that time; transformers adds it before"
    return told


Tables = dict[int, list[Mapping[str, Part]]]
"""For each number of a layer, the table of each rank."""


def _tables(folder: Folder, files: OpenFiles) -> tuple[Tables, str]:
    """The tables of all layers, and the file that says which there are."""
    names = folder.names()
    found = {(int(match[1]), int(match[2])): match[0] for match in map(_LAYER_FILE.fullmatch, names) if match}
    if not found:
        return _unpiped(folder, files)
    num_ranks = 1 + max(rank for _, rank in found)
    layers: Tables = {}
    for number in sorted({number for number, _ in found}):
        for rank in range(num_ranks):
            name = found.get((number, rank))
            if name is None:
                raise CheckpointError(f"layer_{number:02d}-model_{rank:02d}-model_states.pt", "is missing")
            archive = Archive(files[name], name)
            table = tensors_of(archive, name, archive.tree(ALLOWED), without="_extra_state")
            layers.setdefault(number, []).append(table)
    return layers, found[0, 0]


def _unpiped(folder: Folder, files: OpenFiles) -> tuple[Tables, str]:
    """The tables of a run without a pipeline: the names in a rank's file begin with ``sequential`` and the layer's number."""
    names = folder.names()
    found = {int(match[1]): match[0] for match in map(_RANK_FILE.fullmatch, names) if match}
    partitioned = next((name for name in names if _PARTITIONED.fullmatch(name)), None)
    if partitioned is not None:
        rule = "ZeRO-3 keeps the weights of GPT-NeoX in flat pieces, which are not read; save with a lower stage of ZeRO"
        raise CheckpointError(partitioned, rule)
    layers: Tables = {}
    steps = []
    for rank in range(1 + max(found)):
        if rank not in found:
            raise CheckpointError(f"mp_rank_{rank:02d}_model_states.pt", "is missing")
        name = found[rank]
        archive = Archive(files[name], name)
        tree = archive.tree(ALLOWED)
        steps.append((name, step_in(tree, "global_steps", "iteration")))
        module = tree.get("module") if isinstance(tree, dict) else None
        by_layer: dict[int, dict[str, Part]] = {}
        for tensor, part in tensors_of(archive, name, module, without="_extra_state").items():
            match = re.fullmatch(r"(?:module\.)?sequential\.(\d{1,6})\.(.+)", tensor)
            if match is None:
                raise CheckpointError(name, f"holds tensor {tensor!r}; those of GPT-NeoX begin with sequential and a number")
            by_layer.setdefault(int(match[1]), {})[match[2]] = part
        for number, table in by_layer.items():
            if len(layers.setdefault(number, [])) != rank:
                raise CheckpointError(name, f"has a layer {number}, which the files of lower ranks do not have")
            layers[number].append(table)
    check_one_step(steps)
    return layers, found[0]


def _check_sizes(settings: Settings | None, shape: Shape, layers: Tables, table: str) -> None:
    """Layers and ranks are those of the configuration."""
    if shape.num_layers > len(layers):
        rule = f"there are files of {len(layers)} layers in all; the configuration gives the model {shape.num_layers}"
        raise CheckpointError(table, rule)
    last = _FIRST_LAYER + shape.num_layers
    needed = {0, *range(_FIRST_LAYER, last), last + 1}
    head = set() if settings is not None and not settings.switch("no_weight_tying") else {last + 2}
    missing = sorted(needed - layers.keys())
    if settings is not None:
        missing += sorted(head - layers.keys())
    unknown = sorted(layers.keys() - needed - head)
    if missing or unknown:
        number, has = (missing or unknown)[0], "is missing" if missing else "is one too many"
        rule = f"layer {number} {has}: {shape.num_layers} layers are numbers {_FIRST_LAYER} to {last - 1}"
        raise CheckpointError(
            table, f"{rule}, 0 is the embedding, {last + 1} the last norm and {last + 2} a head that is not tied"
        )
    num_ranks = {len(tables) for tables in layers.values()}
    if len(num_ranks) > 1:
        raise CheckpointError(table, f"layers are cut over {sorted(num_ranks)} ranks; all must be over the same")


def _decoder(layers: Tables, shape: Shape, layout: str) -> Decoder:
    first = next(iter(layers[0][0].values()))[0] if layers[0][0] else "layer 0"
    embedding = Ranks(first, layers[0])
    positions = embedding.find("position_embeddings.weight") if shape.family == "gpt2" else None
    words = by_rows(embedding.take("word_embeddings.weight"), "word_embeddings.weight")
    embedding.check_all_taken()
    last = _FIRST_LAYER + shape.num_layers
    final = _ranks(layers, last + 1)
    norm = _norm(final, "norm")
    final.check_all_taken()
    head = None
    if last + 2 in layers:
        ranks = _ranks(layers, last + 2)
        head = _head(ranks.take("final_linear.weight"), words)
        ranks.check_all_taken()
    return Decoder(
        embedding=words,
        positions=None if positions is None else one_copy(positions, "position_embeddings.weight"),
        layers=tuple(_layer(_ranks(layers, _FIRST_LAYER + number), shape, layout) for number in range(shape.num_layers)),
        norm=norm,
        head=head,
    )


def _head(parts: list[Part], words: Stored) -> Stored:
    """A head of its own, which ranks share by rows of the vocabulary or by the columns of its input.

    ``output_layer_parallelism`` says which, where the settings have it; its default changed from the second to the first, so
    that the shapes are asked, which always tell.

    Raises:
        CheckpointError: the parts make up no matrix of the embedding's form in either way.
    """
    what, shapes = "final_linear.weight", {extent.shape for _, extent in parts}
    if len(parts) == 1 or len(shapes) > 1 or len(words.shape) != 2:
        return by_rows(parts, what)
    rows, columns = words.shape
    if shapes == {(rows, columns // len(parts))}:
        return by_columns(parts, what)
    if shapes != {(rows // len(parts), columns)}:
        rule = (
            f"{what}: has shape {list(parts[0][1].shape)} on each of {len(parts)} model-parallel ranks, neither some rows of a "
            f"head of {rows} x {columns}, the embedding's form (output_layer_parallelism column), nor some columns of it (row)"
        )
        raise CheckpointError(parts[0][0], rule)
    return by_rows(parts, what)


def _ranks(layers: Tables, number: int) -> Ranks:
    tables = layers[number]
    where = next((part[0] for table in tables for part in table.values()), f"layer {number}")
    return Ranks(where, tables)


def _layer(ranks: Ranks, shape: Shape, layout: str) -> Layer:
    ranks.drop("rotary_emb.inv_freq")
    heads = {
        kind: parts for kind in ("weight", "bias") if (parts := ranks.find(f"attention.query_key_value.{kind}")) is not None
    }
    if "weight" not in heads:
        ranks.take("attention.query_key_value.weight")
    taken = {kind: _heads(parts, shape, layout) for kind, parts in heads.items()}
    up, gate, down = _mlp(ranks, shape)
    norm, second = _norm(ranks, "input_layernorm"), _norm(ranks, "post_attention_layernorm")
    layer = Layer(
        norm=norm,
        mlp_norm=norm if shape.has_one_norm else second,
        query={kind: parts[0] for kind, parts in taken.items()},
        key={kind: parts[1] for kind, parts in taken.items()},
        value={kind: parts[2] for kind, parts in taken.items()},
        out=_row_parallel(ranks, ("attention.dense",), shape),
        up=up,
        gate=gate,
        down=down,
    )
    ranks.check_all_taken()
    return layer


def _heads(parts: list[Part], shape: Shape, layout: str) -> tuple[list[Part], list[Part], list[Part]]:
    """Queries, keys and values of all heads, each in the order of the heads."""
    what, file = "attention.query_key_value", parts[0][0]
    heads = divided(shape.num_heads, len(parts), "heads", file)
    shared = divided(shape.num_key_value_heads, len(parts), "key/value heads", file)
    rows = parts[0][1].shape[0]
    size = divided(rows, heads + 2 * shared, f"rows of {what} on a rank", file) if shared else rows
    query: list[Part] = []
    key: list[Part] = []
    value: list[Part] = []
    for part in parts:
        if shared == heads:
            cuts = cut(part, [size] * 3 * heads, what)
        elif layout == "blocks":
            cuts = cut(part, [heads * size, shared * size, shared * size], what)
        else:  # of each query head in turn, with its share of the key and the value
            share = divided(size * shared, heads, "rows of keys on a rank", file)
            cuts = cut(part, [size, share, share] * heads, what)
        query += cuts[0::3]
        key += cuts[1::3]
        value += cuts[2::3]
    return query, key, value


def _mlp(ranks: Ranks, shape: Shape) -> tuple[Rows, Rows, Tensors]:
    """Up, gate and down; a gate is packed below the up-projection of each rank, or has a name of its own."""
    if ranks.has("mlp.w1.weight"):
        up, gate = ({"weight": ranks.take(f"mlp.{name}.weight")} for name in ("w3", "w1"))
        return up, gate, _row_parallel(ranks, ("mlp.w2",), shape)
    down = _row_parallel(ranks, ("mlp.linear2", "mlp.dense_4h_to_h"), shape)
    packed: dict[str, list[Part]] = {}
    for kind in ("weight", "bias"):
        parts = ranks.find(f"mlp.linear1.{kind}", f"mlp.dense_h_to_4h.{kind}")
        if parts is not None:
            packed[kind] = parts
    if "weight" not in packed:
        ranks.take("mlp.linear1.weight", "mlp.dense_h_to_4h.weight")
    rows, columns = (sum(extent.shape[0] for _, extent in packed["weight"]), down["weight"].shape[1])
    if rows == columns:
        return packed, {}, down
    if rows != 2 * columns:
        rule = f"mlp.linear1.weight has {rows} rows and mlp.linear2.weight {columns} columns; as many or twice as many are read"
        raise CheckpointError(ranks.where, rule)
    halves = {kind: [cut(part, [part[1].shape[0] // 2] * 2, "mlp.linear1") for part in parts] for kind, parts in packed.items()}
    up = {kind: [pair[0] for pair in pairs] for kind, pairs in halves.items()}
    gate = {kind: [pair[1] for pair in pairs] for kind, pairs in halves.items()}
    return up, gate, down


def _row_parallel(ranks: Ranks, names: tuple[str, ...], shape: Shape) -> Tensors:
    """A layer whose ranks each see a part of the input and whose outputs are added."""
    found: dict[str, Stored] = {"weight": by_columns(ranks.take(*(f"{name}.weight" for name in names)), names[0])}
    bias = ranks.find(*(f"{name}.bias" for name in names))
    if bias is not None:
        what = f"{names[0]}.bias"
        found["bias"] = merged("sum", bias, what) if shape.sums_biases else one_copy(bias, what)
    return found


def _norm(ranks: Ranks, name: str) -> Tensors:
    # TransformerEngine's norms are inside a module of the trainer's own, by the name ``norm``.
    weight = ranks.take(f"{name}.weight", f"{name}.scale", f"{name}.norm.weight")
    found, bias = {"weight": merged("mean", weight, name)}, ranks.find(f"{name}.bias", f"{name}.norm.bias")
    return found if bias is None else found | {"bias": merged("mean", bias, name)}


def _without_padding(model: Decoder, rows: int) -> Decoder:
    """The model without the rows of the vocabulary from ``rows`` on, where there are any."""
    if not 0 < rows < model.embedding.shape[0]:
        return model
    head = None if model.head is None or model.head.shape[0] <= rows else model.head.rows(0, rows)
    return dataclasses.replace(model, embedding=model.embedding.rows(0, rows), head=head)


def _config(settings: Settings, shape: Shape, model: Decoder, end: int | None) -> dict[str, Any]:
    first = model.layers[0]
    sizes = Sizes(
        vocabulary=model.embedding.shape[0],
        intermediate=first.down["weight"].shape[1],
        gated=bool(first.gate),
        dtype=dtype_name(model.embedding),
    )
    if end is not None and end >= sizes.vocabulary:
        end = None
    return config_of(settings, shape, sizes, end)
