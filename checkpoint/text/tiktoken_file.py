"""The file of a vocabulary in tiktoken's form: Llama 3's, as Meta gives it out.

The file has a line for each token, in base64 with its rank. How texts are cut into words and which special tokens there are is
not in it, but in the code beside it, so that only a vocabulary whose code is known is read. Source of both for Llama 3: its
reference code and the tokenizer that transformers has of it.
"""

from __future__ import annotations

import base64
import binascii
import re

from checkpoint.disk.folder import Folder
from checkpoint.errors import CheckpointError, shown

LLAMA_3_TOKENS = 128_000
"""Tokens of Llama 3's vocabulary, without the special ones."""
NAMED = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>", "add_bos_token": True}
"""What the code beside Llama 3's file says of it, by the keys of ``tokenizer_config.json``."""

SPECIAL_TOKENS = 256
_KNOWN = {
    0: "<|begin_of_text|>", 1: "<|end_of_text|>", 4: "<|finetune_right_pad_id|>", 6: "<|start_header_id|>",
    7: "<|end_header_id|>", 8: "<|eom_id|>", 9: "<|eot_id|>", 10: "<|python_tag|>",
}  # fmt: skip
"""Llama 3.1's special tokens that have a meaning; in Llama 3 itself 4, 8 and 10 are of those without one."""
_LINE = re.compile(rb"([A-Za-z0-9+/]+={0,2}) (\d{1,9})")
_MAX_TOKEN_BYTES = 1 << 10


def is_tiktoken(data: bytes) -> bool:
    """Whether a file begins as such a vocabulary does."""
    return _LINE.fullmatch(data[: 4 * _MAX_TOKEN_BYTES].split(b"\n", 1)[0].rstrip(b"\r")) is not None


def read_tiktoken(folder: Folder, file: str) -> list[str] | None:
    """The pieces of the vocabulary in ``file`` by their ids, bytes as GPT-2 spells them, with the special tokens behind.

    Returns:
        ``None`` where the file is of another form.

    Raises:
        CheckpointError: a line is none of a token and its rank, or the vocabulary is not one that is known.
    """
    data = folder.read_bytes(file)
    if not is_tiktoken(data):
        return None
    pieces: list[bytes] = []
    for number, line in enumerate(data.splitlines(), start=1):
        match = _LINE.fullmatch(line)
        try:
            token = base64.b64decode(match[1], validate=True) if match else b""
        except binascii.Error:
            token = b""
        if match is None or not 0 < len(token) <= _MAX_TOKEN_BYTES or int(match[2]) != len(pieces):
            rule = f"line {number}: is {shown(line[:60])}; a token in base64 and its rank, {len(pieces)}, are expected"
            raise CheckpointError(file, rule)
        pieces.append(token)
    if len(set(pieces)) != len(pieces) or len({piece for piece in pieces if len(piece) == 1}) != 256:
        raise CheckpointError(file, "has a token twice, or not every byte as a token")
    if len(pieces) != LLAMA_3_TOKENS:
        rule = f"is a vocabulary of {len(pieces)} tokens in tiktoken's form, which does not say how texts are cut into words"
        raise CheckpointError(file, f"{rule}: only Llama 3's, of {LLAMA_3_TOKENS}, is known; give a tokenizer.json of it")
    spelled = _spelled_bytes()
    return ["".join(spelled[byte] for byte in piece) for piece in pieces] + _special_tokens()


def _special_tokens() -> list[str]:
    reserved = iter(range(SPECIAL_TOKENS))
    return [
        _KNOWN[number] if number in _KNOWN else f"<|reserved_special_token_{next(reserved)}|>"
        for number in range(SPECIAL_TOKENS)
    ]


def _spelled_bytes() -> list[str]:
    """The character that byte-level vocabularies have for each byte: itself where it is seen, else one from 256 up."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    beyond = iter(range(256))
    return [chr(byte) if byte in seen else chr(256 + next(beyond)) for byte in range(256)]
