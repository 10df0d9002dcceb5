"""The file of ``--tokens``: who may call, by the hash of a token; read, checked, and added to.

A token is 256 random bits, so one round of SHA-256 hides it: there is nothing to guess that a slow hash would protect. The file
is JSON::

    {"version": 1, "tokens": [{"name": "alice", "sha256": "…", "scopes": ["generate"], "requests_per_minute": 60}]}

Entries of one name are one tenant, with the same limits: while a token is replaced, the old and the new one both count.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import hashlib
import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from serve.errors import ConfigError
from serve.rpc.checks import MAX_PRIORITY

Scope = Literal["generate", "score", "admin", "metrics"]
SCOPES: Final[tuple[Scope, ...]] = ("generate", "score", "admin", "metrics")
MAX_FILE_BYTES: Final = 4 * 1024 * 1024
MAX_TOKENS: Final = 4096
"""Each call is compared with every entry."""
PREFIX: Final = "tessera_"
"""What every token begins with, so that tools that look for lost secrets know it."""

Name = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9._-]{1,64}\Z")]
_Positive = Annotated[int, msgspec.Meta(ge=1, le=10**12)]
_Priority = Annotated[int, msgspec.Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a tenant may take; ``None`` is no limit of its own."""

    requests_per_minute: _Positive | None = None
    """Requests to generate, and calls to score."""
    tokens_per_minute: _Positive | None = None
    """Tokens of prompts and of what is generated, together."""
    max_running: _Positive | None = None
    """Requests in the engine at once."""
    max_queued: Annotated[int, msgspec.Meta(ge=0, le=10**6)] | None = None
    """Requests that wait for one of ``max_running`` to end; needs that. ``None``: as many as the queue that all share holds."""
    max_priority: _Priority = 0
    """Largest ``priority`` of a request. Tenants share fairly within a priority alone, so a larger one is to be given."""
    shared_cache: bool = False
    """Whether requests share cached prefixes with those of all other tenants who have this too, not with the tenant's alone."""


class Entry(Limits, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the file says of one token: who shows it, what it allows, and until when."""

    name: Name
    """The tenant: a label of metrics, and what logs call the caller."""
    sha256: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
    """The SHA-256 of the token, in hexadecimal."""
    scopes: tuple[Scope, ...] = ("generate", "score")
    expires: Annotated[datetime.datetime, msgspec.Meta(tz=True)] | None = None
    """When it stops counting, with its time zone."""

    @property
    def limits(self) -> Limits:
        """The limits of the tenant whose token this is."""
        return Limits(**{name: getattr(self, name) for name in Limits.__struct_fields__})


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: Literal[1]
    tokens: tuple[Entry, ...]


def read_tokens(path: Path) -> tuple[Entry, ...]:
    """Every entry of the file.

    Raises:
        ConfigError: the file cannot be read or breaks a rule; the message names both, and no more of a hash than it has to.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: has more than {MAX_FILE_BYTES} bytes, which is the limit")
    try:
        entries = msgspec.json.decode(data, type=_File).tokens
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: is no file of tokens: {error}") from error
    _check(path, entries)
    return entries


def _check(path: Path, entries: tuple[Entry, ...]) -> None:
    if len(entries) > MAX_TOKENS:
        raise ConfigError(f"{path}: has {len(entries)} tokens; the limit is {MAX_TOKENS}")
    seen: set[str] = set()
    tenants: dict[str, Limits] = {}
    for place, entry in enumerate(entries):
        if entry.sha256 in seen:
            raise ConfigError(f"{path}: tokens[{place}].sha256 ({entry.name}) is there twice")
        seen.add(entry.sha256)
        if tenants.setdefault(entry.name, entry.limits) != entry.limits:
            raise ConfigError(f"{path}: tokens[{place}] ({entry.name}) has other limits than the entry of that name before it")
        if entry.max_queued is not None and entry.max_running is None:
            raise ConfigError(f"{path}: tokens[{place}].max_queued ({entry.name}) needs max_running")


def digest_of(token: str) -> bytes:
    """What the file holds of a token."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def new_token() -> str:
    """A token nobody can guess: 256 bits of the system's randomness."""
    return PREFIX + secrets.token_urlsafe(32)


def add_token(
    path: Path, name: str, *, scopes: tuple[str, ...], expires: datetime.datetime | None, given: dict[str, object]
) -> str:
    """Make a token, add its hash to the file (made if there is none, readable by its owner alone), and return it.

    Args:
        given: fields of ``Limits``. A name that is there already keeps its limits, and may be given no others.

    Raises:
        ConfigError: the file cannot be read or written, or what is given breaks a rule.
    """
    try:
        # First, so that whoever writes through a link and whoever does not lock the same folder.
        path = path.resolve()
        with _locked(path.parent):
            entries = read_tokens(path) if path.exists() else ()
            before = next((entry.limits for entry in entries if entry.name == name), None)
            kept = {} if before is None else {field: getattr(before, field) for field in Limits.__struct_fields__}
            for field, value in given.items():
                if kept and kept[field] != value:
                    raise ConfigError(f"{name} is in {path} with other limits; change them there: {field} is {kept[field]}")
            token = new_token()
            fields = {"name": name, "sha256": digest_of(token).hex(), "scopes": scopes, "expires": expires, **kept, **given}
            try:
                entry = msgspec.convert(fields, Entry)
            except msgspec.ValidationError as error:
                raise ConfigError(f"the token of {name!r} breaks a rule: {error}") from error
            _check(path, (*entries, entry))
            _write(path, _File(version=1, tokens=(*entries, entry)))
    except (OSError, RuntimeError) as error:  # the latter of a link that leads to itself
        raise ConfigError(f"{path}: cannot be written: {getattr(error, 'strerror', None) or error}") from error
    return token


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Within, no other process adds to a file of this folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _write(path: Path, content: _File) -> None:
    """Replace what is no link, whole or not at all. A file of its own makes the rights 0600 from its first byte on."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileNotFoundError):
            _keep_owner(Path(name), path)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _keep_owner(new: Path, old: Path) -> None:
    """A file that root adds to stays readable for the server's user."""
    before = old.stat()
    if os.geteuid() == 0 and (before.st_uid, before.st_gid) != (0, 0):
        os.chown(new, before.st_uid, before.st_gid)
