"""The connection between a server and the agent of another node: TLS, a shared key, typed msgpack frames. Never pickle.

Both sides prove that they hold the key by an HMAC over both sides' random numbers and the certificate that the server shows, so
that nobody can stand between them, whoever signed it. Frames carry what the sockets of a rank would on one machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import hashlib
import hmac
import os
import socket
import ssl
import struct
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Final

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from serve.errors import ConfigError

BEAT_SECONDS: Final = 1.0
SILENCE_SECONDS: Final = 5.0
"""A side that was not heard of for so long is gone: its machine is dead or frozen, or a link is cut."""
HANDSHAKE_SECONDS: Final = 5.0
MIN_KEY_BYTES: Final = 32
_NONCE_BYTES: Final = 32
_MAX_BYTES: Final = 1 << 20
_MAX_BYTES_BEFORE_KEY: Final = 1 << 10
_PIECE_BYTES: Final = 1 << 16
_LENGTH: Final = struct.Struct("!I")


class LinkLost(Exception):
    """The other side is gone, silent, or speaks something else."""


class Refused(Exception):
    """The other side does not hold the key, or was not let in."""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """An agent says that it is there."""

    nonce: bytes
    node: int | None
    """Which node it is of; ``None`` where the launcher did not say: the first that is free."""


class Challenge(msgspec.Struct, frozen=True, tag=True):
    """What the agent is to prove its key over."""

    nonce: bytes


class Proof(msgspec.Struct, frozen=True, tag=True):
    """An HMAC by the shared key."""

    digest: bytes


class Joined(msgspec.Struct, frozen=True, tag=True):
    """The server's proof; or why the agent, which holds the key, is not wanted now."""

    digest: bytes
    node: int
    refusal: str = ""


class Begin(msgspec.Struct, frozen=True, tag=True):
    """The server asks the agent to start a rank."""

    run: int
    """What it is called by on this link, once and for all."""
    number: int
    local_number: int
    ranks_here: int
    device: str
    meeting: str
    """``HOST:PORT`` where ranks meet."""
    log_level: str


class Began(msgspec.Struct, frozen=True, tag=True):
    """A rank was started; with a text, it could not be."""

    run: int
    process_id: int
    refusal: str = ""


class Signal(msgspec.Struct, frozen=True, tag=True):
    """Send a signal to a rank."""

    run: int
    signal: int


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A rank that the agent had started has ended."""

    run: int
    code: int


class Data(msgspec.Struct, frozen=True, tag=True):
    """What one of a rank's three sockets carries; nothing, where it was closed."""

    run: int
    lane: int
    payload: bytes


class Beat(msgspec.Struct, frozen=True, tag=True):
    """A sign of life of either side."""


Frame = Hello | Challenge | Proof | Joined | Begin | Began | Signal | Ended | Data | Beat

_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final[msgspec.msgpack.Decoder[Frame]] = msgspec.msgpack.Decoder(Frame)


class Link:
    """One connection whose other side has proved its key. Belongs to one event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Before the handshake: small frames alone are read."""
        self._reader, self._writer = reader, writer
        self._largest = _MAX_BYTES_BEFORE_KEY
        self._heard = time.monotonic()
        self._lanes: dict[tuple[int, int], asyncio.Queue[bytes]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        own = writer.get_extra_info("socket")
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(2000 * SILENCE_SECONDS))

    @property
    def peer(self) -> str:
        """The other side's address."""
        return str(self._writer.get_extra_info("peername")[0])

    @property
    def own_address(self) -> str:
        """The address that this side has on the way to the other."""
        return str(self._writer.get_extra_info("sockname")[0])

    @property
    def peer_certificate(self) -> bytes:
        """The certificate that the other side showed, as DER; empty where it showed none."""
        return self._writer.get_extra_info("ssl_object").getpeercert(binary_form=True) or b""

    def send(self, frame: Frame) -> None:
        """Send one frame, at some time."""
        payload = _ENCODER.encode(frame)
        if not self._writer.is_closing():
            self._writer.write(_LENGTH.pack(len(payload)) + payload)

    async def receive(self) -> Frame:
        """The next frame.

        Raises:
            LinkLost: there is none, or it is longer than any or of no known form.
        """
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if length > self._largest:
                raise LinkLost(f"a frame of {length} bytes, where at most {self._largest} are allowed")
            frame = _DECODER.decode(await self._reader.readexactly(length))
        except (OSError, asyncio.IncompleteReadError) as error:
            raise LinkLost(f"the connection was lost: {error}") from None
        except msgspec.DecodeError as error:
            raise LinkLost(f"a frame of no known form: {error}") from None
        self._heard = time.monotonic()
        return frame

    def trust(self) -> None:
        """The handshake has passed: frames may be large."""
        self._largest = _MAX_BYTES
        self._heard = time.monotonic()

    def carry(self, run: int, sockets: Sequence[socket.socket]) -> None:
        """Join a rank's sockets with those at the other end. They are closed when either end is."""
        for lane, end in enumerate(sockets):
            end.setblocking(False)
            queue: asyncio.Queue[bytes] = asyncio.Queue()
            self._lanes[run, lane] = queue
            self._spawn(self._lane(run, lane, end, queue))

    async def run(self, handle: Callable[[Frame], None]) -> LinkLost:
        """Take in frames until the link is lost; those that are not for a rank's sockets go to ``handle``. Returns why."""
        self._spawn(self._beat())
        receiving = asyncio.ensure_future(self._receive_all(handle))
        try:
            while not receiving.done():
                await asyncio.wait((receiving,), timeout=BEAT_SECONDS / 2)
                if (silence := time.monotonic() - self._heard) > SILENCE_SECONDS:
                    return LinkLost(f"nothing was heard for {silence:.1f} s")
            return receiving.result()
        finally:
            receiving.cancel()
            await self.close()

    def leave(self) -> None:
        """End a connection that carries nothing yet, once what was sent has left."""
        self._writer.close()

    async def close(self) -> None:
        """End the connection and all that it carries, without waiting for the other side."""
        self._writer.transport.abort()
        for task in (tasks := tuple(self._tasks)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _receive_all(self, handle: Callable[[Frame], None]) -> LinkLost:
        try:
            while True:
                frame = await self.receive()
                if isinstance(frame, Data):
                    if (queue := self._lanes.get((frame.run, frame.lane))) is not None:
                        queue.put_nowait(frame.payload)
                elif not isinstance(frame, Beat):
                    handle(frame)
        except LinkLost as error:
            return error

    async def _beat(self) -> None:
        while True:
            self.send(Beat())
            await asyncio.sleep(BEAT_SECONDS)

    async def _lane(self, run: int, lane: int, end: socket.socket, queue: asyncio.Queue[bytes]) -> None:
        """Both directions of one socket, until either is closed."""
        directions = [asyncio.ensure_future(self._up(run, lane, end)), asyncio.ensure_future(_down(end, queue))]
        try:
            await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for direction in directions:
                direction.cancel()
            await asyncio.gather(*directions, return_exceptions=True)
            del self._lanes[run, lane]
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
            self.send(Data(run, lane, b""))

    async def _up(self, run: int, lane: int, end: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while piece := await loop.sock_recv(end, _PIECE_BYTES):
                self.send(Data(run, lane, piece))
                await self._writer.drain()

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _down(end: socket.socket, queue: asyncio.Queue[bytes]) -> None:
    loop = asyncio.get_running_loop()
    with contextlib.suppress(OSError):
        while piece := await queue.get():
            await loop.sock_sendall(end, piece)


async def let_in(link: Link, key: bytes, certificate: bytes, place: Callable[[int | None], int | str]) -> int:
    """The server's half of the handshake; returns the node that has joined.

    Args:
        certificate: the server's own, as DER.
        place: the number of a node that wants to join, by the one that it asked for; or why it cannot.

    Raises:
        Refused: the other side does not hold the key, or there is no place for it.
        LinkLost: it went away, or spoke something else.
    """
    hello = await link.receive()
    if not isinstance(hello, Hello) or len(hello.nonce) != _NONCE_BYTES:
        raise LinkLost("it began with something else than a greeting")
    nonce = os.urandom(_NONCE_BYTES)
    link.send(Challenge(nonce))
    proof = await link.receive()
    said = _said(certificate, hello, nonce)
    if not isinstance(proof, Proof) or not hmac.compare_digest(proof.digest, _digest(key, b"agent", said)):
        link.send(Joined(b"", 0))
        raise Refused("it does not hold the key")
    node = place(hello.node)
    refusal, number = (node, 0) if isinstance(node, str) else ("", node)
    link.send(Joined(_digest(key, b"server", said), number, refusal))
    if refusal:
        raise Refused(refusal)
    link.trust()
    return number


async def join(link: Link, key: bytes, node: int | None) -> int:
    """The agent's half of the handshake; returns the node that this is.

    Raises:
        Refused: the server does not hold the key.
        LinkLost: it went away, does not want this node now, or knows another key.
    """
    hello = Hello(os.urandom(_NONCE_BYTES), node)
    link.send(hello)
    challenge = await link.receive()
    if not isinstance(challenge, Challenge) or len(challenge.nonce) != _NONCE_BYTES:
        raise LinkLost("it answered the greeting with something else than a challenge")
    said = _said(link.peer_certificate, hello, challenge.nonce)
    link.send(Proof(_digest(key, b"agent", said)))
    joined = await link.receive()
    if not isinstance(joined, Joined) or not hmac.compare_digest(joined.digest, _digest(key, b"server", said)):
        raise Refused("the server does not hold the key")
    if joined.refusal:
        raise LinkLost(joined.refusal)
    link.trust()
    return joined.node


def _said(certificate: bytes, hello: Hello, nonce: bytes) -> bytes:
    return hashlib.sha256(certificate).digest() + hello.nonce + nonce + _ENCODER.encode(hello.node)


def _digest(key: bytes, side: bytes, said: bytes) -> bytes:
    return hmac.digest(key, side + said, "sha256")


def read_key(path: str, place: str) -> bytes:
    """The shared key in a file, without space around it.

    Raises:
        ConfigError: it cannot be read, or is too short to be one; ``place`` is the option.
    """
    try:
        key = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"{place} is {path}, which cannot be read: {error.strerror}") from None
    if len(key) < MIN_KEY_BYTES:
        raise ConfigError(f"{place} is {path}, which holds {len(key)} bytes; a key has at least {MIN_KEY_BYTES}")
    return key


def server_context(certificate: str, key: str) -> tuple[ssl.SSLContext, bytes]:
    """TLS for the server's side, and its certificate as DER: of the files given, or one made now that only the key vouches for.

    Raises:
        ConfigError: the files are no certificate with its key.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if certificate:
        try:
            context.load_cert_chain(certificate, key or None)
            pem = Path(certificate).read_bytes()
            return context, x509.load_pem_x509_certificates(pem)[0].public_bytes(serialization.Encoding.DER)
        except (OSError, ValueError) as error:
            raise ConfigError(f"nodes.agents_tls_cert is {certificate}, no certificate with its key: {error}") from None
    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "tessera")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(name, name, private.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=3650))
        .sign(private, hashes.SHA256())
    )
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    with tempfile.NamedTemporaryFile(prefix="tessera-", suffix=".pem") as file:  # readable by its owner alone
        file.write(private.private_bytes(encoding, form, serialization.NoEncryption()) + made.public_bytes(encoding))
        file.flush()
        context.load_cert_chain(file.name)
    return context, made.public_bytes(serialization.Encoding.DER)


def agent_context(authority: str) -> ssl.SSLContext:
    """TLS for the agent's side. Without ``authority``, a file of certificates, the shared key alone tells the server.

    Raises:
        ConfigError: the file holds no certificates.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if authority:
        try:
            context.load_verify_locations(authority)
        except OSError as error:
            raise ConfigError(f"--ca-file is {authority}, which holds no certificates: {error}") from None
    else:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
