"""A program under the filters of the systemd unit, without systemd: ``python -m tests.support.unit COMMAND...``.

What systemd does by seccomp is done by seccomp here: system calls by ``SystemCallFilter``, namespaces, families of sockets. The
lists are systemd's own (``systemd-analyze syscall-filter``). What it does by mounts and capabilities is for ``confined``.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path

from tests.repo.documents import REPOSITORY
from tests.support.sandbox import UNIT, restrict

MODEL, CACHE = "/media", "/srv"
"""Where ``confined`` puts the folder of the model, which is only read, and an empty one that can be written."""
_REPOSITORY = "/mnt"
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_MASKED_EQUAL = 7
_NEW_NAMESPACES = 0x7E020080
"""The flags of clone(2) for namespaces."""


class _Compare(ctypes.Structure):
    _fields_ = (("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64))


def setting(name: str) -> list[str]:
    """The values of a key of the unit, a line each."""
    return re.findall(rf"^{name}=(.*)$", UNIT.read_text(), re.MULTILINE)


@cache
def calls_in(name: str) -> frozenset[str]:
    """The system calls of one of systemd's sets, with those of the sets in it."""
    if not name.startswith("@"):
        return frozenset((name,))
    listed = subprocess.run(("systemd-analyze", "syscall-filter", name), capture_output=True, text=True, check=True).stdout
    members = [line.strip() for line in listed.splitlines()[1:] if line.strip() and not line.strip().startswith("#")]
    return frozenset().union(*map(calls_in, members))


def allowed_calls() -> frozenset[str]:
    """What is left of the unit's system calls, line by line."""
    calls: frozenset[str] = frozenset()
    for line in setting("SystemCallFilter"):
        sets = frozenset().union(*map(calls_in, line.removeprefix("~").split()))
        calls = calls - sets if line.startswith("~") else calls | sets
    return calls


def filter_calls() -> None:
    """From now on this process, and what it starts, can make the unit's system calls alone; others fail with EPERM."""
    assert setting("SystemCallErrorNumber") == ["EPERM"]
    library = ctypes.CDLL("libseccomp.so.2")
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(_ERRNO | errno.EPERM))
    for name in allowed_calls() - {"clone", "clone3", "setns", "unshare"}:
        if (number := library.seccomp_syscall_resolve_name(name.encode())) >= 0:  # not of another processor
            library.seccomp_rule_add(context, _ALLOW, number, 0)
    assert setting("RestrictNamespaces") == ["yes"]
    without_namespaces = _Compare(0, _MASKED_EQUAL, _NEW_NAMESPACES, 0)
    clone, clone3 = (library.seccomp_syscall_resolve_name(name) for name in (b"clone", b"clone3"))
    library.seccomp_rule_add_array(context, _ALLOW, clone, 1, ctypes.byref(without_namespaces))
    library.seccomp_rule_add(context, _ERRNO | errno.ENOSYS, clone3, 0)
    if code := library.seccomp_load(context):
        raise OSError(-code, "the filter was refused")


def confined(model: Path) -> list[str]:
    """Words to put before a command: a root file system that is only read, folders of temporary files of its own, no
    capabilities; then the filters. Needs root, to have something to give up."""
    mounts = (
        f"mount --bind {model} {MODEL} && mount -o remount,bind,ro {MODEL} && mount -t tmpfs none {CACHE} && "
        f"mount --bind {REPOSITORY} {_REPOSITORY} && mount -t tmpfs none /tmp && mount -t tmpfs none /var/tmp && "
        f"mkdir -p {REPOSITORY} && mount --bind {_REPOSITORY} {REPOSITORY} && "  # which may lie in /tmp
        'mount -o remount,bind,ro / && exec "$@"'
    )
    dropped = ("setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs")
    return ["unshare", "--mount", "sh", "-ec", mounts, "sh", *dropped, sys.executable, "-m", "tests.support.unit"]


if __name__ == "__main__":
    restrict([getattr(socket, family) for family in setting("RestrictAddressFamilies")[0].split()])
    filter_calls()
    os.execv(sys.argv[1], sys.argv[1:])
