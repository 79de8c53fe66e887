"""What `serve` checks before it starts anything: each raises a StartupError that says what to change."""

import fcntl
import ipaddress
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from skyrl_tinker.config import Settings
from skyrl_tinker.directories import Directories
from skyrl_tinker.errors import StartupError
from skyrl_tinker.store import api_keys
from skyrl_tinker.store.store import write_once
from skyrl_tinker.weight_sync.factory import choose

_BACKLOG = 4096  # thousands of long polls may connect at once


def check_settings(settings: Settings) -> None:
    """Refuse what is not built yet, and what does not go together."""
    _check_samplers(settings)
    choose(settings.weight_transport, settings.device, settings.placement)
    if settings.placement == "colocated":
        _check_colocated(settings)
    if settings.ray_address is not None:
        raise StartupError("--ray-address: joining a Ray cluster is not supported yet; leave it out")


def check_host(settings: Settings) -> None:
    """Refuse what would open the server to a network by mistake. The database is migrated."""
    if settings.insecure or _is_loopback(settings.host):
        return
    if not write_once(settings.store_url, api_keys.count_keys)[0]:
        raise StartupError(
            f"--host {settings.host} is open to the network and there are no API keys; make one with "
            f"`skyrl-tinker keys create`, use 127.0.0.1, or add --insecure on a network that you trust"
        )


def _check_colocated(settings: Settings) -> None:
    """Trainer rank i and sampler GPU i are one device: with other numbers some would stand idle."""
    if settings.phase_min_s > settings.phase_max_s:
        raise StartupError(
            f"phase_min_s {settings.phase_min_s:g} > phase_max_s {settings.phase_max_s:g}: "
            "a turn cannot be longer than the patience of those who wait for its end"
        )
    if settings.sampler_urls:
        raise StartupError("--placement colocated and sampler_urls: others start those elsewhere")
    samplers, ranks = settings.replicas * settings.tensor_parallel_size, settings.trainer_ranks
    if settings.device == "cuda" and samplers != ranks:
        raise StartupError(
            f"--placement colocated on CUDA: {ranks} trainer ranks share their GPUs with {samplers} sampler "
            "GPUs (replicas x tensor_parallel_size): make the numbers equal"
        )


def _check_samplers(settings: Settings) -> None:
    if settings.sampler_urls and settings.replicas > 1:
        raise StartupError(
            f"--replicas {settings.replicas} and sampler_urls: either this server starts samplers, or it "
            "uses those that run; give one of the two"
        )
    named = [("sampler_urls", url) for url in settings.sampler_urls]
    for name, url in [*named, *([("router_url", settings.router_url)] if settings.router_url else [])]:
        if not _is_http(url):
            raise StartupError(f"{name}: found {url!r}, expected http://host:port")
    if len({url.rstrip("/") for url in settings.sampler_urls}) < len(settings.sampler_urls):
        raise StartupError(f"sampler_urls name a server twice: {', '.join(settings.sampler_urls)}")
    if settings.router_url is not None and not settings.sampler_urls:
        raise StartupError("router_url needs sampler_urls: adapters and weights go to each sampler directly")


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is no number
        return False


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@contextmanager
def home_lock(places: Directories) -> Iterator[None]:
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


def _locked(places: Directories) -> str:
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
