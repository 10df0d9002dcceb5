"""Which calls belong together, told to balancers: those of one session, or whose prompts begin alike.

A balancer that sends calls of the same value to the same server has them find their prompt's beginning in its prefix cache.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

from serve.client.errors import TesseraError
from serve.v1 import inference_pb2

NAME: Final = "x-tessera-affinity"
"""The metadata; HAProxy and Envoy see a header of this name."""
NUM_IDS: Final = 64
"""Ids at the beginning of a prompt that count: four blocks of the usual size."""
NUM_CHARACTERS: Final = 256
"""Characters at the beginning of a text that count, or of a conversation's first message."""

_SESSION: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def affinity_of(message: inference_pb2.GenerateRequest, session: str, *, by_prompt: bool) -> tuple[tuple[str, str], ...]:
    """What a call carries beside its other metadata; nothing where nobody asked for it.

    Args:
        session: of the caller's own choice; it goes before the prompt. Empty for none.

    Raises:
        TesseraError: INVALID_ARGUMENT; the session cannot be sent.
    """
    if session:
        if not _SESSION.fullmatch(session):
            raise TesseraError("INVALID_ARGUMENT", f"session is {session[:140]!r}; it must be 1 to 128 of A-Z a-z 0-9 . _ : -")
        return ((NAME, session),)
    return ((NAME, _hash_of(message)),) if by_prompt else ()


def _hash_of(message: inference_pb2.GenerateRequest) -> str:
    """A hash of the prompt's beginning, and of what else must be equal for prompts to share a cache."""
    match message.WhichOneof("prompt"):
        case "token_ids":
            begins = ",".join(map(str, message.token_ids.ids[:NUM_IDS]))
        case "chat":
            begins = "".join(f"{turn.role}\n{turn.content[:NUM_CHARACTERS]}" for turn in message.chat.messages[:1])
        case _:
            begins = message.text[:NUM_CHARACTERS]
    shared = "\0".join((message.model, message.cache_salt, begins))
    return hashlib.blake2b(shared.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
