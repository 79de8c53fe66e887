"""The API as a process of its own."""

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx

from skyrl_tinker.config import Settings
from skyrl_tinker.store.store import Store
from tests.api.support.world import new_home
from tests.support.waiting import PATIENCE_S, wait_until

T = TypeVar("T")


@dataclass(frozen=True)
class Api:
    url: str
    process: subprocess.Popen[bytes]
    settings: Settings

    def wait_until_up(self) -> None:
        wait_until(self._is_up)

    def _is_up(self) -> bool:
        assert self.process.poll() is None
        try:
            httpx.get(f"{self.url}/healthz", verify=False).raise_for_status()
        except httpx.TransportError:
            return False
        return True

    def stop(self, signum: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(signum)
        assert self.process.wait(PATIENCE_S) == 0


@contextmanager
def launched(settings: Settings, listener: socket.socket, log: Path | None = None) -> Iterator[Api]:
    """Without a ready engine and, until a test writes them, without facts. The home exists.

    `log`: a file for what it prints, by default our own stderr.
    """
    file = settings.root / "settings.json"
    file.write_text(settings.model_dump_json())
    fd = listener.fileno()
    command = [sys.executable, "-m", "skyrl_tinker.api.api_process", str(file), str(fd)]
    with nullcontext() if log is None else log.open("ab") as output:
        process = subprocess.Popen(command, pass_fds=[fd], stderr=output)
    listener.close()  # or connections would wait for ever once the API has ended
    try:
        scheme = "https" if settings.tls_cert else "http"
        yield Api(f"{scheme}://127.0.0.1:{settings.port}", process, settings)
    finally:
        process.kill()
        process.wait()


@contextmanager
def launched_on(
    home: Path, fill: Callable[[Store], Awaitable[T]], log: Path | None = None, **changes: Any
) -> Iterator[tuple[Api, T]]:
    """On a new home, which `fill` gives its rows, facts among them; yields what it returned, too."""

    async def written(url: str) -> T:
        store = Store.open(url)
        found = await fill(store)
        await store.close()
        return found

    with socket.create_server(("127.0.0.1", 0)) as listener:
        settings = new_home(home, port=listener.getsockname()[1], **changes)
        found = asyncio.run(written(settings.store_url))
        with launched(settings, listener, log) as api:
            api.wait_until_up()
            yield api, found
