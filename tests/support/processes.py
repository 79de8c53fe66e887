"""The processes below one that a test started. Any of them may end while it is looked at."""

import signal
import socket

import httpx
import psutil

from skyrl_tinker.inference.client.http_connection import bearer
from skyrl_tinker.inference.constants import TOKEN


def command(process: psutil.Process) -> list[str]:
    """Its words, none once it has ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def title(process: psutil.Process) -> str:
    """Its name and its command line, empty once it has ended."""
    try:
        return " ".join((process.name(), *process.cmdline()))
    except psutil.NoSuchProcess:
        return ""


def is_zombie(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def below(pid: int) -> list[psutil.Process]:
    """Its descendants, none once it has ended."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def vllm_servers(pid: int) -> list[psutil.Process]:
    """Those that answer HTTP, below `pid`; not what one of them has forked and not yet given a command."""
    lines = {each.pid: (each, command(each)) for each in below(pid)}
    servers = {
        own: each
        for own, (each, line) in lines.items()
        if "--port" in line and any("vllm.vllm_entry" in word for word in line)
    }
    return [each for each in servers.values() if parent(each) not in servers]


def parent(process: psutil.Process) -> int | None:
    """Its parent's pid, none once it has ended."""
    try:
        return process.ppid()
    except psutil.NoSuchProcess:
        return None


def client_of(server: psutil.Process) -> httpx.Client:
    """Return a client of this vLLM server, with the token that its engine gave it."""
    line = command(server)
    url = f"http://127.0.0.1:{line[line.index('--port') + 1]}"
    return httpx.Client(base_url=url, headers=bearer(server.environ()[TOKEN]))


def heed_ctrl_c() -> None:
    """Also where the tests run in the background of a shell, which has its children ignore it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
