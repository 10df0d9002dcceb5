"""How a client reaches a server and proves who it is: TLS, tokens, balancing, and the environment variables for them."""

from __future__ import annotations

import argparse
import os
import re
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Self, TypedDict

import grpc
import grpc.aio

from serve.client.calls import CHANNEL_OPTIONS, DEFAULT_ADDRESS
from serve.credentials import (
    NEEDS_TLS,
    SYSTEM,
    VARIABLES,
    add_connection_group,
    add_credentials,
    check_token,
    chosen_tls,
    is_loopback,
    read,
    read_token,
)

Metadata = tuple[tuple[str, str | bytes], ...]

_AUTHORIZATION: Final = "authorization"
_PROXY: Final = "grpc.enable_http_proxy"
_SERVICE_CONFIG: Final = "grpc.service_config"
Policy = Literal["pick_first", "round_robin", "weighted_round_robin"]
POLICIES: Final[tuple[Policy, ...]] = ("pick_first", "round_robin", "weighted_round_robin")
_SERVICE_CONFIGS: Final[Mapping[str, str]] = {
    "round_robin": '{"loadBalancingConfig":[{"round_robin":{}}]}',
    # By the stream of reports: what the end of calls tells comes late where answers are long. A server that drains says so in
    # its health, and is left alone from then on.
    "weighted_round_robin": (
        '{"loadBalancingConfig":[{"weighted_round_robin":{"enableOobLoadReport":true,"oobReportingPeriod":"1s",'
        '"blackoutPeriod":"2s","weightUpdatePeriod":"1s"}}],"healthCheckConfig":{"serviceName":"serve.v1.Inference"}}'
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """TLS by files, which are read when the client is made."""

    ca: str | Path | None = None
    """Certificates in PEM of the authorities to trust; ``None``: those that gRPC trusts by default."""
    cert: str | Path | None = None
    """This client's own certificate, in PEM, for a server that asks for one."""
    key: str | Path | None = None
    """The key of ``cert``, in PEM."""
    server_name: str = ""
    """The name that the server's certificate must have; empty: the host of the address. Needed with ``ipv4:`` lists."""

    def credentials(self) -> grpc.ChannelCredentials:
        """
        Raises:
            ValueError: a file cannot be read or does not hold what it must; the message names it.
        """
        if (self.cert is None) != (self.key is None):
            raise ValueError("a client's certificate and its key must be given together")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        roots, key, cert = (None if file is None else read(file) for file in (self.ca, self.key, self.cert))
        try:
            if roots is not None:
                context.load_verify_locations(cadata=roots.decode("ascii"))
        except (ssl.SSLError, ValueError) as error:
            raise ValueError(f"{self.ca} must hold certificates in PEM: {error}") from error
        try:
            if self.cert is not None:
                context.load_cert_chain(self.cert, self.key, password="")  # without one OpenSSL would ask at the terminal
        except ssl.SSLError as error:
            raise ValueError(f"{self.cert} and {self.key} must be a certificate and its key, in PEM: {error}") from error
        return grpc.ssl_channel_credentials(roots, key, cert)


class Connecting(TypedDict, total=False):
    """Keyword arguments of both clients that say how the server is reached. What is left out is read from the environment
    (``TESSERA_TOKEN``, ``TESSERA_CA``, ``TESSERA_CLIENT_CERT``, ``TESSERA_CLIENT_KEY``, ``TESSERA_SERVER_NAME``)."""

    credentials: Tls | grpc.ChannelCredentials | Literal["plain"] | None
    """TLS; ``"plain"`` for none, also where the environment names files."""
    token: str | None
    """Sent with every call, as ``authorization: Bearer TOKEN``; empty for none, also where the environment has one."""
    plain_token: bool
    """Whether the token, or what ``metadata`` has for ``authorization``, may leave this machine without TLS."""
    metadata: Mapping[str, str | bytes]
    """Sent with every call; values of names that end in ``-bin`` are bytes."""
    options: Sequence[tuple[str, Any]]
    """gRPC's own options of the channel; they win over the client's."""
    round_robin: bool
    """``policy="round_robin"``."""
    policy: Policy
    """How calls choose among the addresses that the name resolves to: the first that answers, one after the other, or by the
    load that servers report, those left out whose health is bad."""
    affinity: bool
    """Whether calls that generate carry a hash of their prompt's beginning, as ``x-tessera-affinity``, by which a balancer
    before the servers sends those that begin alike to the same one. A ``session`` of a call goes before it."""


@dataclass(frozen=True, slots=True)
class Connection:
    """What a channel is made of, and what its calls carry."""

    address: str
    options: tuple[tuple[str, Any], ...]
    credentials: grpc.ChannelCredentials | None
    """``None``: without TLS."""
    metadata: Metadata | None
    affinity: bool

    @classmethod
    def of(cls, address: str | None, given: Connecting, environment: Mapping[str, str] | None = None) -> Self:
        """Join what is given with the environment.

        Args:
            address: in gRPC's own words, such as ``host:port``; ``None``: ``TESSERA_ADDRESS``, or this machine.
            given: wins over the environment.
            environment: of the process by default.

        Raises:
            ValueError: a value breaks its rule, or a token would leave this machine without TLS.
            TypeError: there is no such argument.
        """
        if unknown := set(given) - set(Connecting.__annotations__):
            raise TypeError(f"there is no argument {min(unknown)!r}")
        variables = os.environ if environment is None else environment
        address = address or variables.get("TESSERA_ADDRESS") or DEFAULT_ADDRESS
        wanted = given.get("credentials")
        if wanted is None:
            wanted = _tls_of(variables)
        elif not isinstance(wanted, Tls | grpc.ChannelCredentials) and wanted != "plain":
            raise TypeError('credentials must be a Tls, a grpc.ChannelCredentials or "plain"')
        is_local, extra = _is_local(address), dict(given.get("options", ()))
        options: dict[str, Any] = dict(CHANNEL_OPTIONS)
        if is_local:
            options[_PROXY] = 0  # no proxy is of use for this machine, and a token would be told to it
        policy = _policy(given)
        if policy in _SERVICE_CONFIGS:
            if _SERVICE_CONFIG in extra:
                raise ValueError(f"{policy} and the option {_SERVICE_CONFIG} exclude each other: the latter can ask for it")
            options[_SERVICE_CONFIG] = _SERVICE_CONFIGS[policy]
        if isinstance(wanted, Tls) and wanted.server_name:
            options["grpc.ssl_target_name_override"] = wanted.server_name
        options |= extra
        token = given.get("token")
        metadata = _metadata(variables.get("TESSERA_TOKEN", "") if token is None else token, given.get("metadata", {}))
        is_open = wanted == "plain" and not (is_local and not options[_PROXY])
        if is_open and any(name == _AUTHORIZATION for name, _ in metadata) and not given.get("plain_token"):
            raise ValueError(
                f"a token would go to {address} without TLS, for all on the way to read: give credentials (--ca), or say "
                "plain_token (--plain-token) where the network is trusted"
            )
        if isinstance(wanted, Tls):
            credentials: grpc.ChannelCredentials | None = wanted.credentials()
        else:
            credentials = wanted if isinstance(wanted, grpc.ChannelCredentials) else None
        return cls(address, tuple(options.items()), credentials, metadata or None, given.get("affinity", False))

    def channel(self) -> grpc.Channel:
        """A new channel for calls that block; whoever asks closes it."""
        if self.credentials is None:
            return grpc.insecure_channel(self.address, options=self.options)
        return grpc.secure_channel(self.address, self.credentials, options=self.options)

    def aio_channel(self) -> grpc.aio.Channel:
        """A new channel for calls of asyncio, in whose loop it is made; whoever asks closes it."""
        if self.credentials is None:
            return grpc.aio.insecure_channel(self.address, options=self.options)
        return grpc.aio.secure_channel(self.address, self.credentials, options=self.options)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of a command that say how the server is reached."""
    group = add_connection_group(parser)
    forms = "host:port, unix:/path, dns:///host:port or ipv4:a:port,b:port"
    group.add_argument("--address", help=f"{forms} (TESSERA_ADDRESS, else {DEFAULT_ADDRESS})")
    add_credentials(group)
    group.add_argument("--round-robin", action="store_true", help="as --policy round_robin")
    group.add_argument("--affinity", action="store_true", help="tell balancers by a hash which prompts begin alike")
    group.add_argument("--policy", choices=POLICIES, help=f"how calls choose among the addresses of the name ({POLICIES[0]})")


def connecting_of(arguments: argparse.Namespace) -> Connecting:
    """What the options of ``add_arguments`` say.

    Raises:
        ValueError: a file cannot be read, or options exclude each other.
    """
    given = Connecting(round_robin=arguments.round_robin, plain_token=arguments.plain_token)
    given["affinity"] = arguments.affinity
    if arguments.policy is not None:
        given["policy"] = arguments.policy
    chosen = chosen_tls(arguments)
    if arguments.plain:
        if chosen:
            raise ValueError("--plain and --ca, --cert, --key, --server-name exclude each other")
        given["credentials"] = "plain"
    elif chosen:
        given["credentials"] = _tls_of({**os.environ, **chosen})
    if arguments.token_file is not None:
        given["token"] = read_token(arguments.token_file)
    return given


def _tls_of(variables: Mapping[str, str]) -> Tls | Literal["plain"]:
    ca, cert, key, name = (variables.get(variable, "") for variable in VARIABLES.values())
    if not ca:
        if cert or key or name:
            raise ValueError(NEEDS_TLS)
        return "plain"
    return Tls(ca=None if ca == SYSTEM else ca, cert=cert or None, key=key or None, server_name=name)


def _policy(given: Connecting) -> str:
    policy = given.get("policy")
    if policy is not None and policy not in POLICIES:
        raise ValueError(f"policy is {policy!r}; it must be one of {', '.join(POLICIES)}")
    if not given.get("round_robin"):
        return policy or POLICIES[0]
    if policy not in (None, "round_robin"):
        raise ValueError(f"round_robin and the policy {policy} exclude each other")
    return "round_robin"


def _metadata(token: str, given: Mapping[str, str | bytes]) -> Metadata:
    entries = [(name.lower(), value) for name, value in given.items()]
    if token:
        check_token(token)
        if any(name == _AUTHORIZATION for name, _ in entries):
            raise ValueError(f"metadata has {_AUTHORIZATION}, which the token is sent as; give one of them")
        entries.append((_AUTHORIZATION, f"Bearer {token}"))
    return tuple(entries)


def _is_local(address: str) -> bool:
    """Whether an address, in any of gRPC's forms, cannot lead away from this machine."""
    scheme, _, rest = address.partition(":")
    if scheme in ("unix", "unix-abstract"):
        return True
    if scheme in ("ipv4", "ipv6"):
        return all(_is_loopback(one) for one in rest.split(","))
    if scheme == "dns":
        return _is_loopback(rest.removeprefix("///"))  # "//server/name" asks a server of names, which may say anything
    return _is_loopback(address)


def _is_loopback(place: str) -> bool:
    """Whether ``host:port``, ``host`` or ``[address]:port`` is this machine."""
    parts = re.fullmatch(r"(?:\[([^\[\]]+)\]|([^:/\[\]]+))(?::\d+)?", place)
    return is_loopback((parts[1] or parts[2]) if parts else place)
