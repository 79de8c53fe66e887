"""Addresses of a server: for clients, and from its own machine."""

import ipaddress
import socket
from urllib.parse import urlsplit

from skyrl_tinker.config import Settings

_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def client_url(settings: Settings) -> str:
    """Return a URL that clients can use: by the machine's name where the server listens at all addresses."""
    return _url(settings, socket.gethostname() if settings.host in _LOOPBACK else settings.host)


def local_url(settings: Settings) -> str:
    """Return a URL for this machine."""
    return _url(settings, _LOOPBACK.get(settings.host, settings.host))


def is_http(url: str) -> bool:
    """Return whether a text is the URL of a server, with a port that there can be."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is not a number
        return False


def is_loopback(host: str) -> bool:
    """Return whether a name or an IP address of a server is reached from its own machine only."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _url(settings: Settings, host: str) -> str:
    scheme = "http" if settings.tls_cert is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{settings.port}"
