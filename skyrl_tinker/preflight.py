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


def with_port(settings: Settings) -> Settings:
    """The same settings with a port that is free now; port 0 becomes a free one."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.host, settings.port))
        except OSError as error:
            raise StartupError(
                f"cannot listen on {settings.host}:{settings.port} ({error.strerror}); "
                "choose another --port (0 = any free one)"
            ) from error
        return settings.model_copy(update={"port": probe.getsockname()[1]})
