"""What a file holds, told by its size and a hash: of all of it, or of samples of a large one. Names and times play no part."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

WHOLE_BYTES = 256 << 20
"""Files up to this size are hashed as a whole."""
_BLOCK_BYTES = 64 << 10
_BLOCKS = 4096
_PIECE_BYTES = 4 << 20


def sampled_sha256(file: Path) -> str:
    """Hash of a file's size and content; of a large one, of 4,096 blocks of 64 KiB from its first byte to its last.

    A large file that was changed in place, in few bytes and between the blocks, keeps its hash.

    Raises:
        OSError: it cannot be read.
    """
    with file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        digest = hashlib.sha256(f"{size}\n".encode())
        if size <= WHOLE_BYTES:
            while piece := stream.read(_PIECE_BYTES):
                digest.update(piece)
            return digest.hexdigest()
        for number in range(_BLOCKS):
            stream.seek((size - _BLOCK_BYTES) * number // (_BLOCKS - 1))
            digest.update(stream.read(_BLOCK_BYTES))
        return digest.hexdigest()
