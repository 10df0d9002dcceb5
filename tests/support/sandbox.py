"""A program under a unit's ``RestrictAddressFamilies``: ``python -m tests.support.sandbox FAMILIES COMMAND...``.

systemd enforces it by a seccomp filter on ``socket(2)``, which answers EAFNOSUPPORT for every other family; this is the same
filter for x86-64 and 64-bit ARM. FAMILIES are the unit's words, separated by commas.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
import socket
import sys
from pathlib import Path

UNIT = Path(__file__).resolve().parents[2] / "deploy/systemd/tessera-serve.service"
SOCKET_CALL = {"x86_64": 41, "aarch64": 198}
"""Number of ``socket(2)``."""
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06  # BPF: ld word, jeq constant, ret constant
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NUMBER_OFFSET, _FIRST_ARGUMENT_OFFSET = 0, 16  # in struct seccomp_data


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("filter", ctypes.POINTER(_Instruction)))


def as_the_unit() -> list[str]:
    """Words to put before a command, so that it can make the sockets that the unit allows; none on other processors."""
    if platform.machine() not in SOCKET_CALL:
        return []
    allowed = re.search(r"^RestrictAddressFamilies=(.*)$", UNIT.read_text(), re.MULTILINE)
    assert allowed is not None, "the unit restricts no families any more"
    return [sys.executable, "-m", "tests.support.sandbox", ",".join(allowed[1].split())]


def restrict(families: list[int]) -> None:
    """From now on this process, and what it starts, can make sockets of these families alone."""
    call = SOCKET_CALL[platform.machine()]
    end = len(families) + 4  # where ALLOW is; what refuses lies before it
    steps = [(_LOAD, 0, 0, _NUMBER_OFFSET), (_JUMP_IF_EQUAL, 0, end - 2, call), (_LOAD, 0, 0, _FIRST_ARGUMENT_OFFSET)]
    steps += [(_JUMP_IF_EQUAL, end - 1 - at, 0, family) for at, family in enumerate(families, start=len(steps))]
    steps += [(_RETURN, 0, 0, _ERRNO | errno.EAFNOSUPPORT), (_RETURN, 0, 0, _ALLOW)]
    code = (_Instruction * len(steps))(*(_Instruction(*step) for step in steps))
    program = _Program(len(steps), code)
    libc = ctypes.CDLL(None, use_errno=True)
    for words in ((_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0)):
        if libc.prctl(*words):
            raise OSError(ctypes.get_errno(), "prctl refused the filter")


if __name__ == "__main__":
    restrict([getattr(socket, family) for family in sys.argv[1].split(",")])
    os.execv(sys.argv[2], sys.argv[2:])
