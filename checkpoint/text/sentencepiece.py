"""A SentencePiece model as a tokenizer of the ``tokenizers`` library, with the ids of the sentencepiece library."""

from __future__ import annotations

from typing import Any, Final

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from checkpoint.disk.folder import Folder
from checkpoint.errors import CheckpointError, shown
from checkpoint.text.sentencepiece_file import BPE, CONTROL, NEVER, NORMAL, UNIGRAM, UNKNOWN, USER_DEFINED, check, parsed

_SPACE: Final = "▁"


def open_sentencepiece(folder: Folder, file: str) -> tokenizers.Tokenizer:
    """The model in ``file``. Pieces that control, such as ``<s>``, are special tokens, also where a text has them written out.

    Raises:
        CheckpointError: it cannot be read, or is of a kind that has no equal; names the kind.
    """
    model = parsed(folder, file)
    kind, spec = model.trainer_spec.model_type, model.normalizer_spec
    check(file, model)
    user_defined = [piece.piece for piece in model.pieces if piece.type == USER_DEFINED]
    backend = tokenizers.Tokenizer(_unigram(model) if kind == UNIGRAM else _bpe(model))
    steps = _table(spec.precompiled_charsmap) if spec.precompiled_charsmap else []
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
    if user_defined and kind != UNIGRAM:
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
    special = [piece.piece for piece in model.pieces if piece.type in (CONTROL, UNKNOWN)]
    backend.add_special_tokens([tokenizers.AddedToken(piece, normalized=False, special=True) for piece in special])
    return backend


def _table(table: bytes) -> list[Any]:
    """A table of normalisation. tokenizers takes both characters of a line's end for one; sentencepiece makes two of them."""
    step = normalizers.Precompiled(table)
    if step.normalize_str("\r") != step.normalize_str("\n"):
        return [step]
    return [normalizers.Replace("\r", "\n"), step]


def is_plain_bpe(backend: tokenizers.Tokenizer) -> bool:
    """Whether an opened model is BPE, without symbols that its user defined."""
    return isinstance(backend.model, models.BPE) and not backend.model.ignore_merges


def _unigram(model: Any) -> models.Unigram:
    unknown = next(index for index, piece in enumerate(model.pieces) if piece.type == UNKNOWN)
    best = max((piece.score for piece in model.pieces if piece.type == NORMAL), default=0.0)

    def score(piece: Any) -> float:
        if piece.type == USER_DEFINED:  # sentencepiece's own bonus, by the bytes
            return float(len(piece.piece.encode()) * best - 0.1)
        return float(piece.score) if piece.type == NORMAL else NEVER

    vocab = [(piece.piece, score(piece)) for piece in model.pieces]
    return models.Unigram(vocab=vocab, unk_id=unknown, byte_fallback=model.trainer_spec.byte_fallback)


def _bpe(model: Any) -> models.BPE:
    """Merges of pieces that can be joined from two, the highest score first. A CHAR model joins none."""
    vocab = {piece.piece: index for index, piece in enumerate(model.pieces)}
    joinable = {piece.piece for piece in model.pieces if piece.type in (NORMAL, USER_DEFINED)}
    order = sorted(
        (index for index, piece in enumerate(model.pieces) if piece.type == NORMAL and len(piece.piece) > 1),
        key=lambda index: (-model.pieces[index].score, index),
    )
    merges = []
    for index in order if model.trainer_spec.model_type == BPE else []:
        piece = model.pieces[index].piece
        cuts = ((piece[:middle], piece[middle:]) for middle in range(1, len(piece)))
        merges += [(left, right) for left, right in cuts if left in joinable and right in joinable]
    unknown = next(piece.piece for piece in model.pieces if piece.type == UNKNOWN)
    return models.BPE(
        vocab=vocab,
        merges=merges,
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=model.trainer_spec.byte_fallback,
        ignore_merges=any(piece.type == USER_DEFINED for piece in model.pieces),  # such stand alone, joined from nothing
    )


def _literal(text: str) -> str:
    """A pattern for the text itself."""
    return "".join(letter if letter.isalnum() or ord(letter) > 127 else f"\\x{ord(letter):02x}" for letter in text)
