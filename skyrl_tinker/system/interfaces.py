"""Network interfaces and addresses of this host."""

import ipaddress
import socket
from functools import cache
from urllib.parse import urlsplit

import psutil


def interface_of(address: str) -> str:
    """Return the name of the interface that has an IP address. Raises LookupError if none has."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return name
    raise LookupError(f"no network interface of this host has the address {address}")


def address_towards(url: str) -> str | None:
    """Return the address of this host from which it reaches a URL; None if the URL is on this host.

    Raises OSError when its name is unknown.
    """
    parts = urlsplit(url)
    family, _, _, _, target = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # chooses the route; a datagram socket sends nothing
        own = str(probe.getsockname()[0])
    return None if own == target[0] or ipaddress.ip_address(target[0]).is_loopback else own


@cache
def is_here(url: str) -> bool:
    """Return whether a URL is on this host. Raises OSError when its name, looked up once, is unknown."""
    return address_towards(url) is None
