"""Changes bytes as a fuzzer does: by few, by many, by what formats are sensitive to."""

from __future__ import annotations

import random
import struct

_NUMBERS = (
    0,
    1,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0x8000,
    0xFFFF,
    0x7FFFFFFF,
    0x80000000,
    0xFFFFFFFF,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
)
_TOKENS = (
    b"{",
    b"}",
    b"[",
    b"]",
    b'"',
    b"null",
    b"-1",
    b"1e999",
    b"NaN",
    b"\0",
    b"..",
    b"/",
    b"\xff",
    b"&a *a",
    b"!!python/object",
    b"\n- ",
)


def mutated(seed: bytes, others: list[bytes], draw: random.Random) -> bytes:
    """``seed`` after one to five changes; parts of ``others`` may come into it."""
    data = bytearray(seed)
    for _ in range(draw.randint(1, 5)):
        place = draw.randrange(len(data) + 1)
        kind = draw.randrange(8)
        if kind == 0 and data:
            data[place % len(data)] ^= 1 << draw.randrange(8)
        elif kind == 1 and data:
            data[place % len(data)] = draw.randrange(256)
        elif kind == 2:
            data[place:place] = draw.choice(_TOKENS)
        elif kind == 3:
            del data[place : place + draw.choice((1, 2, 4, 16, len(data)))]
        elif kind == 4:
            number = draw.choice(_NUMBERS)
            form = draw.choice(
                [form for form in ("<B", "<H", "<I", "<Q", ">H", ">I", ">Q") if number >> 8 * struct.calcsize(form) == 0]
            )
            data[place : place + struct.calcsize(form)] = struct.pack(form, number)
        elif kind == 5:
            part = bytes(data[place : place + draw.randint(1, 64)])
            data[place:place] = part * draw.choice((1, 2, 30, 1000))
        elif kind == 6 and others:
            other = draw.choice(others)
            begin = draw.randrange(len(other) + 1)
            data[place : place + draw.randint(0, 32)] = other[begin : begin + draw.randint(0, 128)]
        else:
            data[place:place] = bytes(draw.randrange(256) for _ in range(draw.randint(1, 8)))
    return bytes(data)
