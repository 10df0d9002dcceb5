"""Which network interface an address is on."""

from __future__ import annotations

import ipaddress
import socket

import psutil

from serve.errors import ConfigError


def interface_of(address: str) -> dict[str, str]:
    """The variables that have gloo and NCCL use the interface with one of this machine's addresses.

    Raises:
        ConfigError: no interface has it.
    """
    if ipaddress.ip_address(address).is_loopback:
        name = "lo"
    else:
        having = (name for name, entries in psutil.net_if_addrs().items() if any(entry.address == address for entry in entries))
        if (found := next(having, None)) is None:
            raise ConfigError(f"no network interface of this machine has the address {address}")
        name = found
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}


def address_of(host: str, place: str) -> str:
    """The IPv4 address that a name stands for; ``place`` is the option.

    Raises:
        ConfigError: it stands for none, or for all of them.
    """
    try:
        address = socket.gethostbyname(host)
    except OSError as error:
        raise ConfigError(f"{place} names {host!r}, which has no address: {error}") from None
    if ipaddress.ip_address(address).is_unspecified:
        raise ConfigError(f"{place} names {host!r}; it must name one address, at which other nodes reach this one")
    return address
