"""Doorbell among the processes of one PostgreSQL database, on any hosts: LISTEN and NOTIFY."""

import asyncio
import logging
import os
import select
import threading
from contextlib import closing, suppress
from pathlib import Path

from sqlalchemy import Connection, make_url
from sqlalchemy.exc import OperationalError

from skyrl_tinker.store.database.opening import file_of
from skyrl_tinker.store.database.postgresql import PostgresDatabase, execute, raw
from skyrl_tinker.store.doorbell import Doorbell, Role, SocketBell

RETRY_S = 1.0
_CLOSE_S = 1.0
_CHANNELS: dict[Role, str] = {"engine": "skyrl_tinker_engine", "api": "skyrl_tinker_api"}
"""Channels are of one database."""
_log = logging.getLogger(__name__)


class NotifyBell(Doorbell):
    """Connection in a thread of its own, which hears and rings also while the loop is busy.

    It is opened again when it is cut; then it wakes its process, which may have missed a ring.

    NOTIFY runs after the commit and not within it, so that no transaction holds the lock that all of a
    server's databases share for it.
    """

    def __init__(self, url: str, role: Role) -> None:
        """Listen soon. Raises StartupError without psycopg."""
        super().__init__()
        self._database = PostgresDatabase(make_url(url))
        self._role = role
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._to_ring: set[Role] = set()
        self._closed = threading.Event()
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="doorbell", daemon=True)
        self._thread.start()

    async def wait(self, timeout: float) -> bool:  # noqa: ASYNC109
        with self._lock:
            self._loop = asyncio.get_running_loop()
        return await super().wait(timeout)

    def ring(self, role: Role) -> None:
        with self._lock:
            waking = not self._to_ring
            self._to_ring.add(role)
        if waking:
            self._wake_thread()

    def close(self) -> None:
        self._closed.set()
        self._wake_thread()
        self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():  # else it connects to a database that is away
            with self._lock:
                os.close(self._woken)
                os.close(self._wake)
                self._wake = -1

    def _wake_thread(self) -> None:
        """Have the thread look. Raises OSError once the bell is closed."""
        with self._lock:
            os.write(self._wake, b"\0")

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                with closing(self._database.connect()) as conn:
                    execute(conn, f"LISTEN {_CHANNELS[self._role]}")
                    self._hear()
                    self._serve(conn)
            except OperationalError as error:
                _log.warning("the doorbell's connection broke, trying again: %s", error)
                self._closed.wait(RETRY_S)

    def _serve(self, conn: Connection) -> None:
        """Hear and ring until closed. Raises OperationalError when the connection is cut."""
        ready = select.poll()
        for file in (raw(conn).fileno(), self._woken):
            ready.register(file, select.POLLIN)
        while not self._closed.is_set():
            ready.poll()
            self._ring_noted(conn)
            if self._notified(conn):
                self._hear()

    def _ring_noted(self, conn: Connection) -> None:
        with suppress(BlockingIOError):
            os.read(self._woken, 4096)
        with self._lock:
            roles, self._to_ring = self._to_ring, set()
        for role in roles:
            execute(conn, f"NOTIFY {_CHANNELS[role]}")

    def _notified(self, conn: Connection) -> bool:
        import psycopg

        try:
            return len(list(raw(conn).notifies(timeout=0))) > 0
        except psycopg.OperationalError as error:
            raise OperationalError("LISTEN", None, error) from error

    def _hear(self) -> None:
        with self._lock:
            loop = self._loop
            if loop is None:
                self._rung.set()  # nobody waits yet
                return
        with suppress(RuntimeError):  # a loop that is closed: nobody waits any more
            loop.call_soon_threadsafe(self._rung.set)


def bind_doorbell(url: str, home: Path, role: Role) -> Doorbell:
    """Return the bell of a process: of those of a home where the database is a file, else of all.

    Raises StartupError where it cannot be.
    """
    return NotifyBell(url, role) if file_of(url) is None else SocketBell.bind(home, role)
