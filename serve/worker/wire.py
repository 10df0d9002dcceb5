"""Plans, results and configuration as bytes: typed msgpack with a length before it. Never pickle.

A dataclass that is read takes its default for a field that is absent and passes over a key that it does not have. Neither
happens here: the first message of a connection names the form of all of them, which is another one where the server was
upgraded while it ran and the processes that it starts are of the new release.
"""

from __future__ import annotations

import functools
import hashlib
import select
import socket
import struct
import time
from typing import Final, TypeVar

import msgspec

from serve.config import ServerConfig
from serve.engine.executor import ModelFacts, Profiled
from serve.engine.plan import StepPlan, StepResult
from serve.errors import ConfigError, RankStartError, StartError

T = TypeVar("T")

_LENGTH: Final = struct.Struct("!I")
MAX_MESSAGE_BYTES: Final = 1 << 30
_OVERTAKES: Final = 1 << 31
"""In a length: the message may be looked at before what is being done ends. ``is_overtaken`` of steps.cpp reads it, too."""


class ConnectionLost(Exception):
    """The other side closed its end, or died."""


class Malformed(Exception):
    """Bytes that are not the message that was expected."""


class Opening(msgspec.Struct, frozen=True):
    """The first message of a connection."""

    form: str
    """What the form of this and all later messages is known by; both sides must have the same."""
    config: msgspec.Raw


class Ready(msgspec.Struct, frozen=True, tag=True):
    """A rank has loaded its part."""

    facts: ModelFacts


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A rank could not load, or a rehearsal found that none could."""

    message: str
    configured: bool
    """Whether the checkpoint or an option is at fault."""
    by_others: bool = False
    """Whether what failed was an exchange with other ranks, which the end of one of them would explain."""

    def error(self) -> StartError:
        """For the one who started it."""
        return (ConfigError if self.configured else RankStartError)(self.message)


class Fine(msgspec.Struct, frozen=True, tag=True):
    """A rehearsal found nothing."""


class Alike(msgspec.Struct, frozen=True, tag=True):
    """Another checkpoint is of the very shapes that the rank has."""

    num_bytes: int
    """What the rank's weights take."""
    free_bytes: int
    """Memory that could be had for them: the machine's, on the CPU, which all ranks share, else the rank's own device's."""
    checkpoint_step: int | None


class Differs(msgspec.Struct, frozen=True, tag=True):
    """Another checkpoint is not."""

    reason: str


class NoRoom(msgspec.Struct, frozen=True, tag=True):
    """There was no memory for other weights beside those that serve. None of them is kept; they can be read into place."""

    reason: str


class Told(msgspec.Struct, frozen=True, tag=True):
    """How far a rank is with what it was told to record."""

    recorded: Profiled


class Part(msgspec.Struct, frozen=True, tag=True):
    """Some bytes of a trace; none behind its end."""

    data: bytes


Report = Ready | Failed | Fine | Alike | Differs | NoRoom | Told | Part


class Look(msgspec.Struct, frozen=True, tag=True):
    """Open another checkpoint and see whether it is like the one that is served: ``Alike``, ``Differs`` or ``Failed``."""

    config: ServerConfig


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """Make what was looked at ready to be taken; may be told once more. Answered by ``Fine``, ``NoRoom`` or ``Failed``."""

    number: int
    """How plans will call it."""
    beside: bool
    """Whether to read it now."""


class Forget(msgspec.Struct, frozen=True, tag=True):
    """Whatever is ready is not needed, nor what was exchanged last. Answered by ``Fine``."""


class Profile(msgspec.Struct, frozen=True, tag=True):
    """Record the next steps. Answered by ``Fine`` or ``Failed``."""

    steps: int
    at_most_seconds: float
    """The recording ends then, however many steps there were."""


class TellProfiled(msgspec.Struct, frozen=True, tag=True):
    """Say how far the recording is. Answered by ``Told``."""


class SendPart(msgspec.Struct, frozen=True, tag=True):
    """Send what the trace has from there on. Answered by ``Part``."""

    offset: int


class ForgetProfiled(msgspec.Struct, frozen=True, tag=True):
    """The trace is not needed any more, nor what is still to be recorded. Answered by ``Fine``."""


ProfilingOrder = Profile | TellProfiled | SendPart | ForgetProfiled
Order = Look | Prepare | Forget | ProfilingOrder

_ENCODER: Final = msgspec.msgpack.Encoder()
_OPENING: Final = msgspec.msgpack.Decoder(Opening)
_CONFIG: Final = msgspec.msgpack.Decoder(ServerConfig)
_REPORT: Final[msgspec.msgpack.Decoder[Report]] = msgspec.msgpack.Decoder(Report)
_ORDER: Final[msgspec.msgpack.Decoder[Order]] = msgspec.msgpack.Decoder(Order)
_PLAN: Final = msgspec.msgpack.Decoder(StepPlan)
_RESULT: Final = msgspec.msgpack.Decoder(StepResult)


def send(connection: socket.socket, payload: bytes, *, overtakes: bool = False) -> None:
    """Send one message, whole.

    Args:
        overtakes: whether it may be looked at before what came before it is done.

    Raises:
        ConnectionLost: the other side is gone.
    """
    try:
        connection.sendall(_LENGTH.pack(len(payload) | (_OVERTAKES if overtakes else 0)) + payload)
    except OSError as error:
        raise ConnectionLost(str(error)) from error


def await_message(connection: socket.socket, seconds: float, bell: int | None = None) -> bool:
    """Wait until there is something to receive, or the other side is gone; at most so many seconds.

    Args:
        bell: a descriptor that ends the wait as well when there is something to read from it.

    Returns:
        Whether ``receive`` would find something.
    """
    looks = select.poll()
    try:
        looks.register(connection, select.POLLIN)
    except ValueError:  # closed by another thread, which ``receive`` tells
        return True
    number = connection.fileno()
    if bell is not None:
        looks.register(bell, select.POLLIN)
    whole, rest = divmod(1000 * seconds, 1)
    if not (found := looks.poll(whole)):
        time.sleep(rest / 1000)  # ``poll`` waits for whole milliseconds, of which a step may have few
        found = looks.poll(0)
    return any(descriptor == number for descriptor, _ in found)


def is_overtaken(connection: socket.socket) -> bool:
    """Whether a message that may overtake waits to be received; does not wait for one, over a connection without a timeout."""
    assert connection.gettimeout() is None, "recv waits for as long as the timeout, whatever its flags say"
    try:
        first = connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except OSError:  # nothing, or gone, which ``receive`` tells
        return False
    return bool(first) and bool(first[0] & (_OVERTAKES >> 24))


def receive(connection: socket.socket) -> bytes:
    """Receive one message, whole.

    Raises:
        ConnectionLost: the other side is gone, or sent a length beyond any message's.
    """
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    length &= ~_OVERTAKES
    if length > MAX_MESSAGE_BYTES:
        raise ConnectionLost(f"a message of {length} bytes was announced; at most {MAX_MESSAGE_BYTES} are allowed")
    return _exactly(connection, length)


def _exactly(connection: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        try:
            part = connection.recv(min(count - len(parts), 1 << 20))
        except OSError as error:
            raise ConnectionLost(str(error)) from error
        if not part:
            raise ConnectionLost("the other side closed its end")
        parts += part
    return bytes(parts)


def encode(value: object) -> bytes:
    """A dataclass of the engine's, or a ``Report``, as bytes."""
    return _ENCODER.encode(value)


@functools.cache
def form() -> str:
    """A hash of the names, types and defaults of everything that messages are made of, and of what lengths say beside."""
    components = msgspec.json.schema_components((ServerConfig, Report, StepPlan, StepResult))
    return hashlib.sha256(msgspec.json.encode((components, _OVERTAKES))).hexdigest()


def encode_config(config: ServerConfig) -> bytes:
    """The first message, with the configuration."""
    return encode(Opening(form(), msgspec.Raw(encode(config))))


def decode_config(payload: bytes) -> ServerConfig:
    """The configuration that was encoded; its own checks run again.

    Raises:
        Malformed: the bytes are something else, or come from a release whose messages have another form.
    """
    opening = _decoded(_OPENING, payload)
    if opening.form != form():
        raise Malformed("a first message of another release: Tessera was changed while the server ran; start the server again")
    return _decoded(_CONFIG, bytes(opening.config))


def decode_report(payload: bytes) -> Report:
    """What a rank says once it has loaded, or a rehearsal at its end.

    Raises:
        Malformed: the bytes are something else.
    """
    return _decoded(_REPORT, payload)


def decode_order(payload: bytes) -> Order:
    """What a rank is told beside its steps.

    Raises:
        Malformed: the bytes are something else.
    """
    return _decoded(_ORDER, payload)


def decode_plan(payload: bytes) -> StepPlan:
    """The plan that was encoded.

    Raises:
        Malformed: the bytes are something else.
    """
    return _decoded(_PLAN, payload)


def decode_result(payload: bytes) -> StepResult:
    """The result that was encoded.

    Raises:
        Malformed: the bytes are something else.
    """
    return _decoded(_RESULT, payload)


def _decoded(decoder: msgspec.msgpack.Decoder[T], payload: bytes) -> T:
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(f"a message of {len(payload)} bytes that is not the expected one: {error}") from None
