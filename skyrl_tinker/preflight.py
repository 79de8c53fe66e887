"""What `serve` checks before it starts anything: each raises a StartupError that says what to change."""

import fcntl
import ipaddress
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from skyrl_tinker.config import Settings
from skyrl_tinker.errors import StartupError
from skyrl_tinker.places import Places

_BACKLOG = 4096  # thousands of long polls may connect at once


def check_settings(settings: Settings) -> None:
    """Refuse what is not built yet, and what would open the server to a network by mistake."""
    if settings.replicas > 1:
        raise StartupError(f"--replicas {settings.replicas}: only one sampler replica is supported yet")
    if settings.placement != "separate":
        raise StartupError(f"--placement {settings.placement}: only 'separate' is supported yet")
    if settings.ray_address is not None:
        raise StartupError("--ray-address: joining a Ray cluster is not supported yet; leave it out")
    if not settings.insecure and not _is_loopback(settings.host):
        raise StartupError(
            f"--host {settings.host} is open to the network and there are no API keys; "
            "use 127.0.0.1, or add --insecure on a network that you trust"
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@contextmanager
def home_lock(places: Places) -> Iterator[None]:
    """Hold the home for this process; the kernel lets go of it however the process ends."""
    with places.lock_file.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StartupError(_locked(places)) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def _locked(places: Places) -> str:
    pid = places.lock_file.read_text() or "?"
    return f"another server (pid {pid}) runs with --home {places.home}; stop it or choose another home"


def listen(host: str, port: int) -> socket.socket:
    """The listening socket of a server; port 0 is any free one.

    `serve` keeps it for its life and lends it to each API process, so that nobody else can take the port, and
    connections made while an API is started again wait instead of being refused.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise StartupError(
            f"cannot listen on {host}:{port} ({why}); choose another --port (0 = any free one)"
        ) from error
