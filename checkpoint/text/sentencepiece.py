"""A SentencePiece model as a tokenizer of the ``tokenizers`` library, with the ids of the sentencepiece library.

Format: sentencepiece_model.proto of google/sentencepiece. Only what decides on ids and text is read of it.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import tokenizers
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from checkpoint.disk.folder import Folder
from checkpoint.errors import CheckpointError
from checkpoint.model.config import shown

_SPACE: Final = "▁"
_UNIGRAM, _BPE, _CHAR = 1, 2, 4
_KINDS: Final = {_UNIGRAM: "unigram", _BPE: "BPE", 3: "WORD", _CHAR: "CHAR"}
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_NEVER: Final = -1e6
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
"""Of each message the fields that are read: name, number, type, default. ``None`` for one that is repeated."""


def read_pieces(folder: Folder, file: str) -> list[str]:
    """The pieces of a model, in the order of their ids.

    Raises:
        CheckpointError: it cannot be read.
    """
    return [piece.piece for piece in _parsed(folder, file).pieces]


def read_unknown(folder: Folder, file: str) -> int:
    """The id of what a model does not know.

    Raises:
        CheckpointError: it cannot be read, or has none.
    """
    model = _parsed(folder, file)
    _check(file, model)
    return next(index for index, piece in enumerate(model.pieces) if piece.type == _UNKNOWN)


def open_sentencepiece(folder: Folder, file: str) -> tokenizers.Tokenizer:
    """The model in ``file``. Pieces that control, such as ``<s>``, are special tokens, also where a text has them written out.

    Raises:
        CheckpointError: it cannot be read, or is of a kind that has no equal; names the kind.
    """
    model = _parsed(folder, file)
    kind, spec = model.trainer_spec.model_type, model.normalizer_spec
    _check(file, model)
    user_defined = [piece.piece for piece in model.pieces if piece.type == _USER_DEFINED]
    backend = tokenizers.Tokenizer(_unigram(model) if kind == _UNIGRAM else _bpe(model))
    steps: list[Any] = [normalizers.Precompiled(spec.precompiled_charsmap)] if spec.precompiled_charsmap else []
    for symbol in user_defined:
        if any(step.normalize_str(symbol) != symbol for step in steps):
            raise CheckpointError(file, f"has the user-defined symbol {shown(symbol)}, which its own normalisation changes")
        if spec.remove_extra_whitespaces and (" " in symbol or _SPACE in symbol):
            raise CheckpointError(file, f"has the user-defined symbol {shown(symbol)}, and removes spaces; that is not read")
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(r"\A +"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(_SPACE))
    steps.append(normalizers.Replace(" ", _SPACE))
    if spec.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(f"{_SPACE}+\\z"), ""))
    backend.normalizer = normalizers.Sequence(steps)
    cuts: list[Any] = []
    if user_defined and kind != _UNIGRAM:
        # The longest first: at each place the longest one counts.
        words = "|".join(_literal(symbol) for symbol in sorted(user_defined, key=len, reverse=True))
        cuts.append(pre_tokenizers.Split(Regex(words), behavior="isolated"))
    if model.trainer_spec.byte_fallback:
        # A text in which such a piece is written out has no byte there.
        cuts.append(pre_tokenizers.Split(Regex("<0(?=x[0-9A-F]{2}>)"), behavior="merged_with_previous"))
    if cuts:
        backend.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    plain = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    drops = spec.add_dummy_prefix or spec.remove_extra_whitespaces
    backend.decoder = decoders.Sequence([*plain, decoders.Strip(" ", 1, 0)] if drops else plain)
    special = [piece.piece for piece in model.pieces if piece.type in (_CONTROL, _UNKNOWN)]
    backend.add_special_tokens([tokenizers.AddedToken(piece, normalized=False, special=True) for piece in special])
    return backend


def is_plain_bpe(backend: tokenizers.Tokenizer) -> bool:
    """Whether an opened model is BPE, without symbols that its user defined."""
    return isinstance(backend.model, models.BPE) and not backend.model.ignore_merges


def _check(file: str, model: Any) -> None:
    """Refuse what no tokenizer of the library does alike."""
    kind = model.trainer_spec.model_type
    if kind not in (_UNIGRAM, _BPE, _CHAR):
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
    if types.count(_UNKNOWN) != 1:
        raise CheckpointError(file, f"has {types.count(_UNKNOWN)} pieces for what is unknown; there must be one")
    if _UNUSED in types:
        raise CheckpointError(file, f"has the unused piece {shown(pieces[types.index(_UNUSED)])}; such are not read")
    if not set(types) <= {_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE}:
        raise CheckpointError(file, "has a piece of a type that sentencepiece does not know")
    if not all(abs(piece.score) < -_NEVER for piece in model.pieces):
        raise CheckpointError(file, f"has a score that is not a number between {_NEVER:.0f} and {-_NEVER:.0f}")
    if model.trainer_spec.byte_fallback and not {f"<0x{byte:02X}>" for byte in range(256)} <= set(pieces):
        raise CheckpointError(file, "falls back to bytes, and has not all 256 of them as pieces")


def _unigram(model: Any) -> models.Unigram:
    unknown = next(index for index, piece in enumerate(model.pieces) if piece.type == _UNKNOWN)
    best = max((piece.score for piece in model.pieces if piece.type == _NORMAL), default=0.0)

    def score(piece: Any) -> float:
        if piece.type == _USER_DEFINED:  # sentencepiece's own bonus, by the bytes
            return float(len(piece.piece.encode()) * best - 0.1)
        return float(piece.score) if piece.type == _NORMAL else _NEVER

    vocab = [(piece.piece, score(piece)) for piece in model.pieces]
    return models.Unigram(vocab=vocab, unk_id=unknown, byte_fallback=model.trainer_spec.byte_fallback)


def _bpe(model: Any) -> models.BPE:
    """Of pieces that can be joined from two, the one with the highest score is joined first. A CHAR model joins none."""
    vocab = {piece.piece: index for index, piece in enumerate(model.pieces)}
    joinable = {piece.piece for piece in model.pieces if piece.type in (_NORMAL, _USER_DEFINED)}
    order = sorted(
        (index for index, piece in enumerate(model.pieces) if piece.type == _NORMAL and len(piece.piece) > 1),
        key=lambda index: (-model.pieces[index].score, index),
    )
    merges = []
    for index in order if model.trainer_spec.model_type == _BPE else []:
        piece = model.pieces[index].piece
        cuts = ((piece[:middle], piece[middle:]) for middle in range(1, len(piece)))
        merges += [(left, right) for left, right in cuts if left in joinable and right in joinable]
    unknown = next(piece.piece for piece in model.pieces if piece.type == _UNKNOWN)
    return models.BPE(
        vocab=vocab,
        merges=merges,
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=model.trainer_spec.byte_fallback,
        ignore_merges=any(piece.type == _USER_DEFINED for piece in model.pieces),  # such stand alone, joined from nothing
    )


def _literal(text: str) -> str:
    """A pattern for the text itself."""
    return "".join(letter if letter.isalnum() or ord(letter) > 127 else f"\\x{ord(letter):02x}" for letter in text)


def _parsed(folder: Folder, file: str) -> Any:
    data = folder.read_bytes(file)
    model = _message()()
    try:
        model.ParseFromString(data)
    except DecodeError as error:
        raise CheckpointError(file, f"is no SentencePiece model: {error}") from error
    if not model.pieces:
        raise CheckpointError(file, "is no SentencePiece model: it has no pieces")
    return model


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
