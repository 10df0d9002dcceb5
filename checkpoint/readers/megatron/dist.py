"""Reads Megatron's ``torch_dist``: torch.distributed.checkpoint of whole tensors, with layers stacked and Megatron's names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from checkpoint.disk.folder import Folder
from checkpoint.errors import CheckpointError
from checkpoint.given import NOTHING_GIVEN, Given
from checkpoint.layout import Piece, Stored
from checkpoint.readers.dcp.distcp import read_item, read_wanted
from checkpoint.readers.decoder import Decoder, Layer, Rows, Tensors
from checkpoint.readers.files.torch_zip import Archive
from checkpoint.readers.megatron.args import ALLOWED, Shape, arguments, shape_of
from checkpoint.readers.megatron.model import TOKENIZER, check_version, named_weights, tokenizer_names
from checkpoint.readers.ranks import Part, divided, step_in
from checkpoint.readers.surroundings import find_tokenizer
from checkpoint.readers.weights import OpenFiles, Weights

NAME = "Megatron-LM torch_dist"
LOOKS_LIKE = "metadata.json, .metadata and __0_0.distcp; above them, latest_checkpointed_iteration.txt"

_MARK = "metadata.json"
_COMMON, _COMMON_ITEM = "common.pt", "common_state/shard_0_1"
"""Where the arguments are: in a file of their own, or, since July 2026, beside the tensors."""
_WANTED = re.compile(r"decoder\.(?:layers|final_(?:layer)?norm)\..+|embedding\.[^.]+\.weight|output_layer\.weight")


def recognises(folder: Folder) -> bool:
    """Whether there is the file by which Megatron marks a distributed checkpoint."""
    names = folder.names()
    return _MARK in names and any(name in (".metadata", _COMMON) or name.endswith(".distcp") for name in names)


def newest_below(_: Folder) -> str | None:
    """``None``: the file that names the newest is that of Megatron's other layout too, which reads it."""
    return None


def open_weights(folder: Folder, given: Given = NOTHING_GIVEN) -> Weights:
    """Open every file with weights, and prove that tensors and arguments agree.

    Raises:
        CheckpointError: the save is of another kind; a file is missing or broken; a tensor is missing, unknown or of another
            form; the arguments describe a model that transformers does not have.
    """
    kind = folder.read_object(_MARK).get("sharded_backend")
    if kind != "torch_dist":
        raise CheckpointError(_MARK, f"sharded_backend is {kind!r}; torch_dist is read")
    with OpenFiles(folder) as files:
        tree, file = _common(folder, files)
        check_version(tree, file)
        args = arguments(tree, file)
        shape = shape_of(args)
        tensors, table = read_wanted(folder, files, lambda name: _WANTED.fullmatch(name) is not None)
        model = _Names(tensors, table).decoder(shape)
        tokenizer = find_tokenizer(folder, given, above=True, named=tokenizer_names(args), inside=TOKENIZER)
        step = step_in(tree, "iteration")
        num_ranks = args.count("tensor_model_parallel_size", default=1)
        return named_weights(model, args, shape, num_ranks, files.descriptors, tokenizer, step)


def _common(folder: Folder, files: OpenFiles) -> tuple[Mapping[Any, Any], str]:
    """What is saved beside the tensors, and its file."""
    if folder.has(_COMMON):
        tree, file = Archive(files[_COMMON], _COMMON).tree(ALLOWED), _COMMON
    else:
        found = read_item(folder, files, _COMMON_ITEM, ALLOWED)
        if found is None:
            raise CheckpointError(_COMMON, f"is missing, and so is {_COMMON_ITEM} among the tensors: the run's arguments")
        tree, file = found
    if isinstance(tree, list) and len(tree) == 1:
        tree = tree[0]
    if not isinstance(tree, dict):
        raise CheckpointError(file, f"holds {type(tree).__name__} where a table must stand")
    return tree, file


@dataclass(slots=True)
class _Names:
    """The tensors of the files; each is taken once."""

    tensors: dict[str, Stored]
    table: str

    def decoder(self, shape: Shape) -> Decoder:
        stacked = {name: stored for name, stored in self.tensors.items() if re.match(r"decoder\.layers\.(?!\d)", name)}
        for name, stored in stacked.items():
            if stored.shape[0] != shape.num_layers:
                rule = f"tensor {name!r} is of {stored.shape[0]} layers; args.num_layers is {shape.num_layers}"
                raise CheckpointError(stored.file, rule)
            del self.tensors[name]
            for number in range(shape.num_layers):
                self.tensors[name.replace("layers.", f"layers.{number}.", 1)] = _layer_of(stored, number)
        numbers = {int(match[1]) for name in self.tensors if (match := re.match(r"decoder\.layers\.(\d{1,6})\.", name))}
        if len(numbers) != shape.num_layers:
            rule = f"has tensors of {len(numbers)} layers; args.num_layers is {shape.num_layers}"
            raise CheckpointError(self.table, rule)
        embedding = self._take("embedding.word_embeddings.weight")
        positions = self._take("embedding.position_embeddings.weight") if shape.family == "gpt2" else None
        norm = self._both("decoder.final_layernorm.", "decoder.final_norm.")
        head = None if shape.tied else self._take("output_layer.weight")
        self.tensors.pop("output_layer.weight", None)
        layers = tuple(self._layer(f"decoder.layers.{number}.", shape) for number in range(shape.num_layers))
        for name, stored in self.tensors.items():
            raise CheckpointError(stored.file, f"holds tensor {name!r}, which is not known of Megatron's GPT models")
        return Decoder(embedding=embedding, positions=positions, layers=layers, norm=norm, head=head)

    def _layer(self, prefix: str, shape: Shape) -> Layer:
        packed = self._both(f"{prefix}self_attention.linear_qkv.")
        heads = {kind: _groups(stored, shape) for kind, stored in packed.items()}
        up, gate = self._up(f"{prefix}mlp.linear_fc1.", shape)
        return Layer(
            norm=self._both(f"{prefix}self_attention.linear_qkv.layer_norm_", f"{prefix}input_layernorm."),
            mlp_norm=self._both(f"{prefix}mlp.linear_fc1.layer_norm_", f"{prefix}pre_mlp_layernorm."),
            query={kind: parts[0] for kind, parts in heads.items()},
            key={kind: parts[1] for kind, parts in heads.items()},
            value={kind: parts[2] for kind, parts in heads.items()},
            out=self._both(f"{prefix}self_attention.linear_proj."),
            up=up,
            gate=gate,
            down=self._both(f"{prefix}mlp.linear_fc2."),
        )

    def _up(self, name: str, shape: Shape) -> tuple[Rows, Rows]:
        """The up-projection and the gate, which is above it in one tensor, or apart."""
        if not shape.gated:
            return {kind: _parts(stored) for kind, stored in self._both(name).items()}, {}
        if f"{name}weight_w" in self.tensors:
            gate, up = (self._both(name, ends=end) for end in ("_w", "_v"))
            return {kind: _parts(item) for kind, item in up.items()}, {kind: _parts(item) for kind, item in gate.items()}
        both = self._both(name)
        half = divided(both["weight"].shape[0], 2, "rows of the MLP", both["weight"].file)
        up = {kind: stored.rows(half, 2 * half) for kind, stored in both.items()}
        gate = {kind: stored.rows(0, half) for kind, stored in both.items()}
        return {kind: _parts(item) for kind, item in up.items()}, {kind: _parts(item) for kind, item in gate.items()}

    def _both(self, *names: str, ends: str = "") -> Tensors:
        """Weight and, where there is one, bias under the first of the names that is there."""
        name = next((name for name in names if f"{name}weight{ends}" in self.tensors), names[0])
        found = {"weight": self._take(f"{name}weight{ends}")}
        bias = self.tensors.pop(f"{name}bias{ends}", None)
        return found if bias is None else found | {"bias": bias}

    def _take(self, name: str) -> Stored:
        if name not in self.tensors:
            raise CheckpointError(self.table, f"has no tensor {name!r}")
        return self.tensors.pop(name)


def _layer_of(stored: Stored, number: int) -> Stored:
    """One layer of a stack of them."""
    row = stored.rows(number, number + 1)
    pieces = []
    for piece in row.pieces:
        extent = replace(piece.extent, shape=piece.extent.shape[1:], strides=piece.extent.strides[1:])
        pieces.append(Piece(piece.file, extent, piece.start[1:]))
    return Stored(row.dtype, row.shape[1:], tuple(pieces), row.merge)


def _parts(stored: Stored) -> list[Part]:
    """The stretches of whole rows that a tensor lies in, in order."""
    for piece in stored.pieces:
        if piece.extent.shape[1:] != stored.shape[1:]:
            raise CheckpointError(piece.file, "keeps a tensor that is cut by rows in training in boxes of a part of each row")
    return [(piece.file, piece.extent) for piece in sorted(stored.pieces, key=lambda piece: piece.start)]


def _groups(stored: Stored, shape: Shape) -> tuple[list[Part], list[Part], list[Part]]:
    """Queries, keys and values; the rows are, of one group after the other, its queries, its key, its value."""
    size = shape.head_size
    queries = divided(shape.num_heads, shape.num_groups, "heads", stored.file) * size
    each = queries + 2 * size
    if stored.shape[0] != shape.num_groups * each:
        rule = f"linear_qkv has {stored.shape[0]} rows; {shape.num_groups} groups of {each} are expected by args"
        raise CheckpointError(stored.file, rule)
    query: list[Part] = []
    key: list[Part] = []
    value: list[Part] = []
    for begin in range(0, stored.shape[0], each):
        query += _parts(stored.rows(begin, begin + queries))
        key += _parts(stored.rows(begin + queries, begin + queries + size))
        value += _parts(stored.rows(begin + queries + size, begin + each))
    return query, key, value
