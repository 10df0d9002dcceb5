"""Gives a pipeline's tensors, named by layer, the names that the model of transformers has.

Known are pipelines of transformers' own blocks, for families whose order of layers leaves no choice: embeddings, perhaps their
norm, blocks, last norm, head. Others are told by a file: YAML or JSON, from a layer's number to the prefix of its names, to a
table of prefixes, or to null for a layer that is left out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from checkpoint.errors import CheckpointError
from checkpoint.layout import Stored
from checkpoint.model.config import NOTHING_KNOWN
from checkpoint.model.config import layers as num_layers

_MAX_FILE_BYTES = 1 << 20
_OF_LAYER = re.compile(r"(\d{1,9})\.(.+)")
_SHARED = "tied_modules."
"""Before the names of what several layers share, in what ``ds_to_universal`` made: for the families known, the embedding."""
_BEFORE_ALL = -1
_ASK = "say which names of the model its layers have (--layer-map)"


@dataclass(frozen=True, slots=True)
class _Family:
    """What a family calls its layers, and the tensor that every block of it has and no other layer."""

    marker: str
    blocks: str
    embeddings: tuple[str, ...]
    """One for each matrix before the blocks."""
    norm: str
    embedding_norm: str = ""
    """What the norm of the vectors before the blocks is called; empty where there is none."""
    head: str = "lm_head."
    types: tuple[str, ...] = ()
    """The model types that have these names, where others have blocks that look like theirs; empty where none is known to."""


_GPT2 = ("transformer.wte.", "transformer.wpe.")
_OPT = ("model.decoder.embed_tokens.", "model.decoder.embed_positions.")
_FAMILIES = (
    # Those whose blocks have a tensor of their own come before those with which they share one.
    _Family(
        "self_attn.dense.weight",
        "model.layers.",
        ("model.embed_tokens.",),
        "model.final_layernorm.",
        types=("phi", "persimmon"),
    ),
    _Family("self_attn.out_proj.weight", "model.decoder.layers.", _OPT, "model.decoder.final_layer_norm.", types=("opt",)),
    _Family("self_attn.q_proj.weight", "model.layers.", ("model.embed_tokens.",), "model.norm."),  # Llama, and all like it
    _Family("self_attn.qkv_proj.weight", "model.layers.", ("model.embed_tokens.",), "model.norm."),  # Phi-3
    _Family("attention.query_key_value.weight", "gpt_neox.layers.", ("gpt_neox.embed_in.",), "gpt_neox.final_layer_norm."),
    _Family("attn.c_attn.weight", "transformer.h.", _GPT2, "transformer.ln_f."),  # GPT-BigCode too
    _Family("attn.attention.q_proj.weight", "transformer.h.", _GPT2, "transformer.ln_f."),  # GPT-Neo
    _Family("attn.q_proj.weight", "transformer.h.", _GPT2[:1], "transformer.ln_f."),  # GPT-J
    _Family("attn.qkv_proj.weight", "transformer.h.", _GPT2[:1], "transformer.ln_f."),  # CodeGen
    _Family(  # Falcon has no norm before its blocks
        "self_attention.query_key_value.weight",
        "transformer.h.",
        ("transformer.word_embeddings.",),
        "transformer.ln_f.",
        "transformer.word_embeddings_layernorm.",
        types=("bloom", "falcon"),
    ),
)


def by_layers(names: Iterable[str]) -> bool:
    """Whether every name begins with a layer's number, or is that of a module that several layers share."""
    names = list(names)
    return bool(names) and all(_OF_LAYER.fullmatch(name) or name.startswith(_SHARED) for name in names)


def file_of_layer(number: int, other: str) -> str:
    """What the file of a layer is called, as that of another layer is."""
    return f"layer_{number:02d}{'-model_00' if '-model_00-' in other else ''}-model_states.pt"


def rename(
    places: Mapping[str, Stored], layer_map: str | None, table: str, config: Mapping[str, Any] = NOTHING_KNOWN
) -> dict[str, Stored]:
    """Where each tensor lies, by the names of the model instead of those by layers.

    Args:
        places: by names that begin with the layer's number.
        layer_map: path of a file that says what each layer is; ``None`` for what is known of families.
        table: the file that a message names.
        config: the model's, where it is known: how many blocks there are, and of which type, since others' may look alike.

    Raises:
        CheckpointError: a layer is none that is known, is missing, or is not in the file; the file is not as described.
    """
    layers: dict[int, dict[str, Stored]] = {}
    for name, stored in places.items():
        match = _OF_LAYER.fullmatch(name)
        if match is None and (layer_map is not None or not name.startswith(_SHARED)):
            rule = f"holds {name!r} outside a layer, which no layer map names"
            raise CheckpointError(table, f"{rule}; open the save that it was converted from")
        number, local = (int(match[1]), match[2]) if match is not None else (_BEFORE_ALL, name.removeprefix(_SHARED))
        layers.setdefault(number, {})[local] = stored
    named = _by_family(layers, table, config) if layer_map is None else _by_file(layers, layer_map)
    found: dict[str, Stored] = {}
    for number, names in named.items():
        for local, name in names.items():
            if name in found:
                raise CheckpointError(
                    layer_map or table, f"gives the name {name!r} to two tensors, the second of layer {number}"
                )
            found[name] = layers[number][local]
    return found


def _by_family(layers: Mapping[int, Mapping[str, Stored]], table: str, config: Mapping[str, Any]) -> dict[int, dict[str, str]]:
    """For each layer, the model's names by the layer's own."""
    num_blocks, model_type = num_layers(config), config.get("model_type")
    for family in _FAMILIES:
        blocks = sorted(number for number, tensors in layers.items() if _prefix(family, tensors) is not None)
        if not blocks:
            continue
        if model_type is not None and family.types and model_type not in family.types:
            rule = f"has blocks like those of {' and '.join(family.types)}; its configuration says {model_type}"
            raise CheckpointError(table, f"{rule}, whose layers are not known; {_ASK}")
        missing = next((number for number in range(blocks[0], blocks[-1]) if number not in layers), None)
        if missing is not None and num_blocks != len(blocks):  # all blocks are there: a layer may have no parameters
            rule = "is missing between other layers"
            raise CheckpointError(file_of_layer(missing, table), rule if num_blocks is not None else f"{rule}; {_ASK}")
        if blocks != [number for number in sorted(layers) if blocks[0] <= number <= blocks[-1]]:
            raise CheckpointError(table, f"stands among layers {blocks[0]} to {blocks[-1]}, not all of one kind; {_ASK}")
        if num_blocks is not None and len(blocks) != num_blocks:
            rule = f"begins {len(blocks)} blocks, layers {blocks[0]} to {blocks[-1]}; its configuration says {num_blocks}"
            raise CheckpointError(table, f"{rule}: is one missing?")
        named: dict[int, dict[str, str]] = {}
        for number, tensors in sorted(layers.items()):
            if number in blocks:
                named[number] = _block(family, blocks.index(number), tensors, number)
        before = [(number, local) for number in sorted(layers) if number < blocks[0] for local in layers[number]]
        after = [number for number in sorted(layers) if number > blocks[-1]]
        _embeddings(family, layers, before, named)
        for number in after:
            named[number] = _after(family, layers[number], number)
        if not any(name.startswith(family.norm) for number in after for name in named[number].values()):
            raise CheckpointError(
                table, f"has no layer with the last norm behind its blocks, which end at {blocks[-1]}; {_ASK}"
            )
        return named
    kinds = ", ".join(family.marker for family in _FAMILIES)
    raise CheckpointError(table, f"is of a pipeline whose blocks are not known (they have none of {kinds}); {_ASK}")


def _prefix(family: _Family, tensors: Iterable[str]) -> str | None:
    """What stands before the block's own names, such as the attribute of a wrapper; ``None`` where this is no block."""
    marked = next((name for name in tensors if f".{name}".endswith(f".{family.marker}")), None)
    return None if marked is None else marked.removesuffix(family.marker)


def _block(family: _Family, number: int, tensors: Iterable[str], layer: int) -> dict[str, str]:
    prefix = _prefix(family, tensors)
    assert prefix is not None, "only blocks are asked"
    for name in tensors:
        if not name.startswith(prefix):
            raise CheckpointError(_file(layer), f"holds {name!r} beside a block whose names begin with {prefix!r}; {_ASK}")
    return {name: f"{family.blocks}{number}.{name.removeprefix(prefix)}" for name in tensors}


def _embeddings(
    family: _Family,
    layers: Mapping[int, Mapping[str, Stored]],
    before: list[tuple[int, str]],
    named: dict[int, dict[str, str]],
) -> None:
    """Name the matrices before the blocks, by order or by a name of their own that is the model's, and the norm behind them."""
    norms = [
        (number, local)
        for number, local in before
        if family.embedding_norm and len(layers[number][local].shape) == 1 and local.rpartition(".")[2] in ("weight", "bias")
    ]
    for number, local in norms:
        named.setdefault(number, {})[local] = family.embedding_norm + local.rpartition(".")[2]
    matrices = [place for place in before if place not in norms]
    shapes = [layers[number][local].shape for number, local in matrices]
    alike = all(len(shape) == 2 and shape[1] == shapes[0][-1] for shape in shapes)
    if len(matrices) != len(family.embeddings) or not alike:
        held = ", ".join(f"{number}.{local}" for number, local in before) or "none"
        rule = f"has the tensors {held} before its blocks, where {len(family.embeddings)} embeddings must stand; {_ASK}"
        raise CheckpointError(_file(before[0][0] if before else 0), rule)
    prefixes = list(family.embeddings)
    own = {prefix.split(".")[-2]: prefix for prefix in prefixes}
    known = [next((prefix for word, prefix in own.items() if word in local.split(".")), None) for _, local in matrices]
    if None not in known and len(set(known)) == len(known):
        prefixes = [prefix for prefix in known if prefix is not None]
    for (number, local), prefix in zip(matrices, prefixes, strict=True):
        named.setdefault(number, {})[local] = f"{prefix}weight"


def _after(family: _Family, tensors: Mapping[str, Stored], layer: int) -> dict[str, str]:
    """The names of the last norm, whose weight has one dimension, and of the head, whose weight has two."""
    matrices = {local.rpartition(".")[0] for local, stored in tensors.items() if len(stored.shape) == 2}
    found: dict[str, str] = {}
    for local, stored in tensors.items():
        module, _, kind = local.rpartition(".")
        if kind not in ("weight", "bias") or len(stored.shape) not in (1, 2):
            raise CheckpointError(_file(layer), f"holds {local!r} behind the blocks, which is neither norm nor head; {_ASK}")
        found[local] = f"{family.head if module in matrices else family.norm}{kind}"
    return found


def _by_file(layers: Mapping[int, Mapping[str, Stored]], path: str) -> dict[int, dict[str, str]]:
    """For each layer, the model's names by the layer's own, as a file says."""
    said = _read(path)
    for number in said:
        if number not in layers:
            raise CheckpointError(path, f"names layer {number}, which the checkpoint does not have")
    named: dict[int, dict[str, str]] = {}
    for number, tensors in layers.items():
        if number not in said:
            raise CheckpointError(path, f"does not name layer {number}, which holds {next(iter(tensors))!r}")
        prefixes = said[number]
        if prefixes is None:
            continue
        for local in tensors:
            begins = max((begin for begin in prefixes if local.startswith(begin)), key=len, default=None)
            if begins is None:
                raise CheckpointError(path, f"has no prefix for {local!r} of layer {number}")
            named.setdefault(number, {})[local] = prefixes[begins] + local.removeprefix(begins)
    return named


def _read(path: str) -> dict[int, dict[str, str] | None]:
    """The file's table: for each layer its prefixes by those that they replace, or ``None``."""
    try:
        data = Path(os.path.expanduser(path)).read_bytes()
        if len(data) > _MAX_FILE_BYTES:
            raise CheckpointError(path, f"has {len(data)} bytes; at most {_MAX_FILE_BYTES} are read")
        node = yaml.compose(data, Loader=yaml.SafeLoader)
        keys = [key.value for key, _ in node.value] if isinstance(node, yaml.MappingNode) else []
        value: Any = yaml.safe_load(data)
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise CheckpointError(path, f"is neither YAML nor JSON: {error}") from error
    if not isinstance(value, dict) or not value:
        raise CheckpointError(path, "must be a table from the numbers of layers to prefixes of names")
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise CheckpointError(path, f"names layer {twice} twice")
    found: dict[int, dict[str, str] | None] = {}
    for key, prefixes in value.items():
        if not str(key).isdecimal():
            raise CheckpointError(path, f"has the key {key!r}, where the number of a layer must stand")
        if isinstance(prefixes, str):
            prefixes = {"": prefixes}
        if prefixes is not None and not _is_texts(prefixes):
            raise CheckpointError(path, f"gives layer {key} {prefixes!r}; it must be a prefix, a table of prefixes or null")
        found[int(key)] = prefixes
    return found


def _is_texts(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for pair in value.items() for text in pair)


def _file(layer: int) -> str:
    return "tied_modules" if layer == _BEFORE_ALL else f"layer_{layer:02d}-model_states.pt"
