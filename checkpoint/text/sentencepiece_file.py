"""What a SentencePiece model's file holds.

Format: sentencepiece_model.proto of google/sentencepiece. Only what decides on ids and text is read of it.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from checkpoint.disk.folder import Folder
from checkpoint.errors import CheckpointError, shown

UNIGRAM, BPE, CHAR = 1, 2, 4
"""Kinds of models."""
_KINDS: Final = {UNIGRAM: "unigram", BPE: "BPE", 3: "WORD", CHAR: "CHAR"}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of pieces."""
NEVER: Final = -1e6
"""Score of what is in the vocabulary and never stands for a text."""

_FIELDS: Final = {
    "Piece": (("piece", 1, "string", ""), ("score", 2, "float", ""), ("type", 3, "int32", "1")),
    "Trainer": (
        ("model_type", 3, "int32", "1"),
        ("treat_whitespace_as_suffix", 24, "bool", "false"),
        ("byte_fallback", 35, "bool", "false"),
    ),
    "Normalizer": (
        ("precompiled_charsmap", 2, "bytes", ""),
        ("add_dummy_prefix", 3, "bool", "true"),
        ("remove_extra_whitespaces", 4, "bool", "true"),
        ("escape_whitespaces", 5, "bool", "true"),
    ),
    "Model": (
        ("pieces", 1, "Piece", None),
        ("trainer_spec", 2, "Trainer", ""),
        ("normalizer_spec", 3, "Normalizer", ""),
        ("denormalizer_spec", 5, "Normalizer", ""),
    ),
}
"""By message, the fields that are read: name, number, type, default. ``None`` for one that is repeated."""


def read_pieces(folder: Folder, file: str) -> list[str]:
    """The pieces of a model, in the order of their ids.

    Raises:
        CheckpointError: it cannot be read.
    """
    return [piece.piece for piece in parsed(folder, file).pieces]


def read_unknown(folder: Folder, file: str) -> int:
    """The id of what a model does not know.

    Raises:
        CheckpointError: it cannot be read, or has none.
    """
    model = parsed(folder, file)
    check(file, model)
    return next(index for index, piece in enumerate(model.pieces) if piece.type == UNKNOWN)


def parsed(folder: Folder, file: str) -> Any:
    """The model in ``file``, as a message with the fields of ``_FIELDS``.

    Raises:
        CheckpointError: it is no such file.
    """
    data = folder.read_bytes(file)
    model = _message()()
    try:
        model.ParseFromString(data)
    except DecodeError as error:
        raise CheckpointError(file, f"is no SentencePiece model: {error}") from error
    if not model.pieces:
        raise CheckpointError(file, "is no SentencePiece model: it has no pieces")
    return model


def check(file: str, model: Any) -> None:
    """Refuse what no tokenizer of the ``tokenizers`` library does alike."""
    kind = model.trainer_spec.model_type
    if kind not in (UNIGRAM, BPE, CHAR):
        rule = f"is a SentencePiece model of kind {_KINDS.get(kind, kind)}; unigram, BPE and CHAR are read"
        raise CheckpointError(file, rule)
    for key, refused in (
        ("treat_whitespace_as_suffix", model.trainer_spec.treat_whitespace_as_suffix),
        ("escape_whitespaces off", not model.normalizer_spec.escape_whitespaces),
        ("denormalizer_spec", bool(model.denormalizer_spec.precompiled_charsmap)),
    ):
        if refused:
            raise CheckpointError(file, f"is a SentencePiece model with {key}, which is not read")
    pieces = [piece.piece for piece in model.pieces]
    if len(set(pieces)) != len(pieces) or "" in pieces:
        raise CheckpointError(file, "has a piece twice, or an empty one")
    types = [piece.type for piece in model.pieces]
    if types.count(UNKNOWN) != 1:
        raise CheckpointError(file, f"has {types.count(UNKNOWN)} pieces for what is unknown; there must be one")
    if UNUSED in types:
        raise CheckpointError(file, f"has the unused piece {shown(pieces[types.index(UNUSED)])}; such are not read")
    if not set(types) <= {NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE}:
        raise CheckpointError(file, "has a piece of a type that sentencepiece does not know")
    if not all(abs(piece.score) < -NEVER for piece in model.pieces):
        raise CheckpointError(file, f"has a score that is not a number between {NEVER:.0f} and {-NEVER:.0f}")
    if model.trainer_spec.byte_fallback and not {f"<0x{byte:02X}>" for byte in range(256)} <= set(pieces):
        raise CheckpointError(file, "falls back to bytes, and has not all 256 of them as pieces")


@cache
def _message() -> Any:
    """The class of a model, in a pool of its own: other libraries may have put the same messages in the common one."""
    file = descriptor_pb2.FileDescriptorProto(name="sentencepiece.proto", package="tessera", syntax="proto2")
    kind = descriptor_pb2.FieldDescriptorProto
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        for field, number, type_name, default in fields:
            added = message.field.add(name=field, number=number)
            added.label = kind.LABEL_REPEATED if default is None else kind.LABEL_OPTIONAL
            if type_name in _FIELDS:
                added.type, added.type_name = kind.TYPE_MESSAGE, f".tessera.{type_name}"
                continue
            added.type = getattr(kind, f"TYPE_{type_name.upper()}")
            if default:
                added.default_value = default
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tessera.Model"))
