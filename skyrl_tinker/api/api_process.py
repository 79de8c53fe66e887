"""One API process on an inherited socket: `python -m skyrl_tinker.api.api_process SETTINGS_JSON FD [NAME]`.

SIGTERM ends it within a second; SIGUSR2 once its open requests are answered, for a successor.
"""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, cast

import uvicorn
import uvloop
from fastapi import FastAPI

from skyrl_tinker import config
from skyrl_tinker.api.app import create_app
from skyrl_tinker.api.bounded_connections import ConnectionCaps, Connections
from skyrl_tinker.api.services import Services
from skyrl_tinker.config import Settings
from skyrl_tinker.directories import Directories
from skyrl_tinker.domain.bases import Bases
from skyrl_tinker.errors import StartupError
from skyrl_tinker.redaction import log_to_stderr
from skyrl_tinker.store import server_state
from skyrl_tinker.store.cluster.notify_bell import bind_doorbell
from skyrl_tinker.store.doorbell import Doorbell
from skyrl_tinker.store.store import Store
from skyrl_tinker.system.processes import (
    die_with_parent,
    freeze_gc,
    raise_open_files_limit,
    return_freed_memory,
)

FACTS_WITHIN_S = 60.0
_FACTS_POLL_S = 0.1
_KEEP_ALIVE_S = 75
_DRAIN_S = 1
_RETIRE_S = 600.0
"""Longest time for the last answers of a process that is replaced: streams and downloads."""
_SWITCH_S = 0.0005
"""Delay after which busy threads return the GIL to the event loop, which releases it with every read."""


class ApiServer(uvicorn.Server):
    """Uvicorn with our signal handlers; it ends the long polls before it drains connections."""

    def __init__(self, app: FastAPI, listens: Callable[[], object] = lambda: None) -> None:
        self._services: Services = app.state.services
        settings = self._services.settings
        caps = ConnectionCaps(
            settings.api_share(settings.connections.total),
            settings.api_share(settings.connections.per_address),
        )
        self._listens = listens
        self._patience_s: float = _DRAIN_S
        self._draining: asyncio.Timeout | None = None
        super().__init__(
            uvicorn.Config(
                app,
                http=cast(Any, Connections(caps)),
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,  # Signer reads them, if a setting says so
                lifespan="on",
                ws="none",
                timeout_keep_alive=_KEEP_ALIVE_S,
                ssl_certfile=settings.tls_cert,
                ssl_keyfile=settings.tls_key,
            )
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals here: uvicorn would raise them again before the store is closed."""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self.request_stop)
        loop.add_signal_handler(signal.SIGUSR2, self._retire)
        yield

    def request_stop(self) -> None:
        self.should_exit = True
        self._patience_s = _DRAIN_S
        if self._draining is not None:
            self._draining.reschedule(asyncio.get_running_loop().time() + _DRAIN_S)

    def _retire(self) -> None:
        if not self.should_exit:
            self.should_exit = True
            self._patience_s = _RETIRE_S

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._listens()

    async def on_tick(self, counter: int) -> bool:
        """Stop, to be restarted by `serve`, when a background task of the lifespan has died."""
        return await super().on_tick(counter) or bool(self.lifespan.error_occurred)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._services.waiter.stop()
        await super().shutdown(sockets)

    async def _wait_tasks_to_complete(self) -> None:
        """Wait for the last answers. TimeoutError, on which uvicorn cancels them."""
        try:
            async with asyncio.timeout(self._patience_s) as self._draining:
                await super()._wait_tasks_to_complete()
        finally:
            self._draining = None


async def read_bases(store: Store, bell: Doorbell, within_s: float = FACTS_WITHIN_S) -> Bases:
    """Wait for the base models that `serve` writes. StartupError after `within_s`."""
    try:
        async with asyncio.timeout(within_s):
            while (bases := await store.read(server_state.get_bases)) is None:
                await bell.wait(_FACTS_POLL_S)
    except TimeoutError:
        raise StartupError(
            f"no base models in the store after {within_s:.0f} s: "
            "the API is started by `skyrl-tinker serve`, which writes them"
        ) from None
    return bases


async def run(
    settings: Settings,
    listener: socket.socket,
    files_home: Path | None = None,
    listens: Callable[[], object] = lambda: None,
) -> None:
    """Serve until SIGTERM, SIGINT or SIGUSR2; call `listens` once connections are accepted.

    `files_home`: base of the relative paths in rows, where that is not this process's home.
    """
    with closing(bind_doorbell(settings.store_url, settings.root, "api")) as bell:
        store = Store.open(settings.store_url, files_home or settings.root)
        try:
            bases = await read_bases(store, bell)
            app = create_app(settings, store, bases, bell)
            freeze_gc()
            await ApiServer(app, listens).serve([listener])
        finally:
            await store.close()  # its last commits ring


def prepare() -> None:
    """Set up this process for many connections."""
    sys.setswitchinterval(_SWITCH_S)
    raise_open_files_limit()
    return_freed_memory()
    log_to_stderr()


def main() -> None:
    prepare()
    die_with_parent()
    settings = config.read_back(Path(sys.argv[1]))
    listener = socket.socket(fileno=int(sys.argv[2]))
    if len(sys.argv) == 3:
        uvloop.run(run(settings, listener))
        return
    note = Directories(settings).listening_note(os.getpid())
    try:
        uvloop.run(run(settings, listener, listens=note.touch))
    finally:
        note.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
