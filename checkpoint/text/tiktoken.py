"""A vocabulary in tiktoken's form as a tokenizer of the ``tokenizers`` library."""

from __future__ import annotations

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers

from checkpoint.text.tiktoken_file import SPECIAL_TOKENS

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""How the code beside Llama 3's file cuts texts into words."""


def open_tiktoken(pieces: list[str]) -> tokenizers.Tokenizer:
    """The tokenizer of a vocabulary that was read."""
    plain = pieces[:-SPECIAL_TOKENS]
    ids = {piece: number for number, piece in enumerate(plain)}
    merges: list[tuple[str, str]] = []
    for piece in plain:  # of the two parts that a token can be joined from, the more frequent first
        cuts = ((piece[:middle], piece[middle:]) for middle in range(1, len(piece)))
        found = [(left, right) for left, right in cuts if left in ids and right in ids]
        merges += sorted(found, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    backend = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=merges, fuse_unk=False, ignore_merges=True))
    words = pre_tokenizers.Split(Regex(_WORDS), behavior="isolated", invert=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    special = [tokenizers.AddedToken(token, normalized=False, special=True) for token in pieces[-SPECIAL_TOKENS:]]
    backend.add_special_tokens(special)
    return backend
