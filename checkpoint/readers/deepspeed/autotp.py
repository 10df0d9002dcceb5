"""Reads the saves of DeepSpeed's tensor-parallel training (AutoTP): a file for each rank, with its part of every tensor.

Since 2026 a save says itself which boxes of each tensor every rank has (``universal_checkpoint_info``); of those before, the
names of transformers' layers say which dimension is cut.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from checkpoint.disk.folder import Folder
from checkpoint.errors import CheckpointError
from checkpoint.given import NOTHING_GIVEN, Given
from checkpoint.layout import Extent, Piece, Stored, contiguous_strides, copies, joined, whole
from checkpoint.readers.deepspeed import one_save, saves
from checkpoint.readers.deepspeed.client_state import SOUGHT, client_config, client_tokenizer
from checkpoint.readers.deepspeed.saves import ANY_LAYER, MODULE, UNIVERSAL, Saved, open_saved
from checkpoint.readers.files.pickles import StoredTensor
from checkpoint.readers.surroundings import find_configs
from checkpoint.readers.weights import OpenFiles, Weights

NAME = "DeepSpeed tensor-parallel"
LOOKS_LIKE = "mp_rank_00_model_states.pt and one for each further rank, or above them `latest`"
newest_below = saves.newest_below

_MOST_BOXES = 1 << 16
"""Boxes of one tensor: a fused layer has one for each of its parts on each rank."""
_BY_ROWS = re.compile(
    r"(.*\.)?(q_proj|k_proj|v_proj|gate_proj|up_proj|fc1|fc_in|query_key_value|dense_h_to_4h|lm_head|embed_out)\.(weight|bias)"
)
_BY_COLUMNS = re.compile(r"(.*\.)?(o_proj|out_proj|down_proj|fc2|fc_out|dense|dense_4h_to_h)\.weight")
_EMBEDDING = re.compile(r"(.*\.)?(embed_tokens|embed_in|wte)\.weight")
_FUSED = re.compile(r"(.*\.)?(c_attn|qkv_proj|gate_up_proj|Wqkv)\.(weight|bias)")


def recognises(folder: Folder) -> bool:
    """Whether the folder has the files of several model-parallel ranks, with no layers of a pipeline."""
    modules = [name for name in folder.names() if MODULE.fullmatch(name)]
    return len(modules) > 1 and not saves.has_any(folder, ANY_LAYER) and not folder.has(UNIVERSAL)


def open_weights(folder: Folder, given: Given = NOTHING_GIVEN) -> Weights:
    """Open the file of every rank and prove that their parts make up every tensor.

    Raises:
        CheckpointError: a rank's file is missing, the ranks do not have the same names, or it cannot be told how parts join.
    """
    names = folder.names()
    saves.refuse_experts(names)
    found = {rank[0]: name for rank, name in saves.by_rank(names, MODULE).items()}
    missing = next((rank for rank in range(len(found)) if rank not in found), None)
    if missing is not None:
        raise CheckpointError(f"mp_rank_{missing:02d}_model_states.pt", f"is missing; there is rank {max(found)}")
    with OpenFiles(folder) as files:
        ranks = [open_saved(files, found[rank]) for rank in range(len(found))]
        first = ranks[0]
        for saved in ranks:
            _check_world(saved, len(ranks))
        one_save.check_model_files(ranks)
        tables = _tables(ranks)
        saves.refuse_adapter(first.file, tables[0])
        configs, said = find_configs(folder, given, above=True), client_config(folder, given, first)
        rows = (said or {}).get("vocab_size") if configs is None else configs[0].get("vocab_size")
        places = _join(ranks, tables, rows if isinstance(rows, int) else None)
        saves.check_cover(first.file, places)
        facts = saves.trained_with(first) | {"tensor-parallel ranks": len(ranks)}
        if first.count("dp_world_size") is not None:
            facts["data-parallel ranks"] = first.count("dp_world_size")
        tokenizer = client_tokenizer(folder, given, first)
        return Weights(
            files.descriptors, places, first.file, said, SOUGHT, step=saves.step_of(first), facts=facts, tokenizer=tokenizer
        )


def _check_world(saved: Saved, count: int) -> None:
    stages = saved.count("checkpoint_parallel_dimensions", "pp_degree")
    if stages is not None and stages > 1:
        raise CheckpointError(
            saved.file, f"is of a pipeline of {stages} stages, whose layers lie in layer_* files, which are missing"
        )
    said = saved.count("mp_world_size")
    if said is not None and said != count:
        raise CheckpointError(saved.file, f"says that {said} ranks share the model; the folder has the files of {count}")


def _tables(ranks: Sequence[Saved]) -> list[dict[str, StoredTensor]]:
    """The tensors of every rank's module; all have the same names."""
    tables = [saved.tensors("module") for saved in ranks]
    if not tables[0]:
        raise CheckpointError(ranks[0].file, "holds no module")
    for saved, table in zip(ranks, tables, strict=True):
        for name in table.keys() ^ tables[0].keys():
            has, lacks = (saved, ranks[0]) if name in table else (ranks[0], saved)
            raise CheckpointError(has.file, f"holds tensor {name!r}, which {lacks.file} does not")
    return tables


def _join(ranks: Sequence[Saved], tables: Sequence[Mapping[str, StoredTensor]], rows: int | None) -> dict[str, Stored]:
    """Where each tensor lies, over all ranks."""
    said = _said(ranks[0])
    places: dict[str, Stored] = {}
    known: dict[StoredTensor, str] = {}
    for name, tensor in tables[0].items():
        parts = [(saved, table[name]) for saved, table in zip(ranks, tables, strict=True)]
        if name in said:
            places[name] = _by_map(name, parts, said[name])
        elif tensor in known:
            places[name] = places[known[tensor]]
        else:
            places[name] = _by_name(name, parts, rows)
        known.setdefault(tensor, name)
    return places


def _said(first: Saved) -> dict[str, Mapping[str, Any]]:
    """What the save says of how tensors are cut, by their names."""
    found: dict[str, Mapping[str, Any]] = {}
    for pattern, value in first.table("universal_checkpoint_info", "affine_map", "params").items():
        if not isinstance(pattern, str) or pattern[:1] != "^" or pattern[-1:] != "$" or not isinstance(value, dict):
            raise CheckpointError(first.file, f"has {pattern!r} in its map of parts, which is no name with a table")
        found[re.sub(r"\\(.)", r"\1", pattern[1:-1])] = value
    return found


_Parts = Sequence[tuple[Saved, StoredTensor]]


def _by_map(name: str, parts: _Parts, said: Mapping[str, Any]) -> Stored:
    """A tensor whose parts the save lists."""
    first = parts[0][0]
    try:
        shape = tuple(said["logical_shape"])
        listed = [said["ranks"][rank]["pieces"] for rank in range(len(parts))]
        pieces: list[Piece] = []
        scaled: list[tuple[str, Extent]] = []
        for rank, ((saved, tensor), held) in enumerate(zip(parts, listed, strict=True)):
            if not held or 0 in tensor.shape:
                continue
            extent = _shard(name, saved, tensor)
            for piece in held:
                if piece.get("scale", 1) != 1:
                    if piece["scale"] * len(parts) != 1 or tuple(piece["shape"]) != shape:
                        raise CheckpointError(saved.file, f"keeps {name!r} scaled by {piece['scale']!r}, which is not joined")
                    scaled.append((saved.file, extent))
                elif rank == min(piece["locations"]):
                    pieces += _boxes(saved.file, extent, shape, piece)
                if len(pieces) > _MOST_BOXES:
                    raise CheckpointError(saved.file, f"cuts {name!r} into more than {_MOST_BOXES} boxes")
        if scaled:
            return copies("sum", scaled)
        return Stored(pieces[0].extent.dtype, shape, tuple(pieces))
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointError(first.file, f"has no readable list of the parts of {name!r} ({error})") from error


def _shard(name: str, saved: Saved, tensor: StoredTensor) -> Extent:
    """A rank's part as a row of elements, in the order of which the map counts."""
    extent = saved.archive.extent(name, tensor)
    if extent.strides != contiguous_strides(extent.shape) and extent.num_elements > 1:
        raise CheckpointError(saved.file, f"keeps {name!r} with strides {list(extent.strides)}; it must be contiguous")
    return extent


def _boxes(file: str, shard: Extent, shape: tuple[int, ...], piece: Mapping[str, Any]) -> Iterator[Piece]:
    """The boxes of one piece: elements at strides of the tensor, and at strides of the rank's part."""
    size, (source, steps), (dest, strides) = tuple(piece["shape"]), piece["source"], piece["dest"]
    numbers = (*size, source, *steps, dest, *strides, *shape)
    if (
        any(type(number) is not int or number < 0 for number in numbers)
        or 0 in size
        or not len(size) == len(steps) == len(strides)
    ):
        raise ValueError("sizes and strides must be counts")
    if dest + sum((n - 1) * s for n, s in zip(size, strides, strict=True)) >= shard.num_elements:
        raise ValueError("a piece leaves the rank's part")
    yield from _peel(file, shard, shape, (size, source, tuple(steps), dest, tuple(strides)))


_Strided = tuple[tuple[int, ...], int, tuple[int, ...], int, tuple[int, ...]]


def _peel(file: str, shard: Extent, shape: tuple[int, ...], piece: _Strided) -> Iterator[Piece]:
    """Take outer dimensions off a piece until what is left lies along the dimensions of the tensor."""
    size, source, steps, dest, strides = piece
    missing = len(shape) - len(size)
    along = contiguous_strides(shape)
    if missing >= 0:
        full = (1,) * missing + size
        if all(n == 1 or step == want for n, step, want in zip(full, (0,) * missing + steps, along, strict=True)):
            start, rest = [], source
            for step in along:
                start.append(rest // step)
                rest %= step
            moved = Extent(shard.dtype, full, (1,) * missing + strides, shard.offset_bytes + dest * shard.item_bytes)
            yield Piece(file, moved, tuple(start))
            return
    if not size:
        raise ValueError("a piece does not lie along the tensor")
    if size[0] > _MOST_BOXES:
        raise ValueError("a piece has too many boxes")
    for number in range(size[0]):
        inner = (size[1:], source + number * steps[0], steps[1:], dest + number * strides[0], strides[1:])
        yield from _peel(file, shard, shape, inner)


def _by_name(name: str, parts: _Parts, rows: int | None) -> Stored:
    """A tensor of which the save does not say how it is cut.

    Args:
        rows: of the whole vocabulary, by the model's configuration.
    """
    saved, tensor = parts[0]
    if _FUSED.fullmatch(name):
        rule = (
            f"holds {name!r}, several layers in one, and does not say how ranks share it; save it with DeepSpeed 0.19 or newer"
        )
        raise CheckpointError(saved.file, rule)
    held = [(part.file, part.archive.extent(name, stored)) for part, stored in parts if 0 not in stored.shape]
    if not held:
        raise CheckpointError(saved.file, f"holds an empty {name!r}, as all ranks do")
    dim = 0 if _BY_ROWS.fullmatch(name) else 1 if _BY_COLUMNS.fullmatch(name) else None
    if _EMBEDDING.fullmatch(name):
        dim = _embedding_dim(name, saved, [extent.shape[0] for _, extent in held], rows)
    elif _BY_ROWS.fullmatch(name) and name.endswith(("lm_head.weight", "embed_out.weight")) and tensor.shape[0] == rows:
        dim = None
    if dim is None:
        return whole(*held[0])
    try:
        return joined(dim, held)
    except (ValueError, IndexError) as error:
        raise CheckpointError(saved.file, f"tensor {name!r}: {error}") from error


def _embedding_dim(name: str, saved: Saved, held: Sequence[int], rows: int | None) -> int | None:
    """Whether the vocabulary is cut: with the head it is tied to, or not at all."""
    if rows is None and len(set(held)) == 1:
        rule = f"holds {held[0]} rows of {name!r}: all, or a part? Give the model's config.json, which says it (--model-config)"
        raise CheckpointError(saved.file, rule)
    return None if rows is not None and held[0] == rows else 0
