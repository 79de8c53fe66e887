"""The processes below one that a test started. Any of them may end while it is looked at."""

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
    """Those that answer HTTP, below `pid`."""
    lines = ((each, command(each)) for each in below(pid))
    return [
        each for each, line in lines if "--port" in line and any("vllm.entrypoints" in word for word in line)
    ]


def client_of(server: psutil.Process) -> httpx.Client:
    """Return a client of this vLLM server, with the token that its engine gave it."""
    line = command(server)
    url = f"http://127.0.0.1:{line[line.index('--port') + 1]}"
    return httpx.Client(base_url=url, headers=bearer(server.environ()[TOKEN]))
