"""Wake-up between processes of one server. It carries no data and may be lost, so its receivers also poll."""

import asyncio
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from skyrl_tinker.system.user_directory import make_private, user_directory

Role = Literal["engine", "api"]


class Doorbell(ABC):
    """Bell of one process, which also rings those of others. Rings are kept until the first `wait`."""

    def __init__(self) -> None:
        self._rung = asyncio.Event()

    async def wait(self, timeout: float) -> bool:  # noqa: ASYNC109  (a timeout is an answer here)
        """Wait for a ring since the last `wait`. Returns False after `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                await self._rung.wait()
        except TimeoutError:
            return False
        self._rung.clear()
        return True

    @abstractmethod
    def ring(self, role: Role) -> None:
        """Wake the engine, or every API process. Never blocks; processes absent or awake are skipped."""

    @abstractmethod
    def close(self) -> None: ...


class SocketBell(Doorbell):
    """Datagram socket, for processes of one home."""

    def __init__(self, directory: Path, role: Role) -> None:
        """Use `SocketBell.bind`."""
        super().__init__()
        self._directory = directory
        self._path = directory / ("engine.sock" if role == "engine" else f"api-{os.getpid()}.sock")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(str(self._path))

    @classmethod
    def bind(cls, home: Path, role: Role) -> "SocketBell":
        """Bind this role's socket.

        Raises StartupError if the directory belongs to another user.
        """
        place = user_directory(Path("/tmp"), home)
        for path in (place.parent, place):
            make_private(path)
        return cls(place, role)

    async def wait(self, timeout: float) -> bool:  # noqa: ASYNC109
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._socket, self._drain)
        return await super().wait(timeout)

    def ring(self, role: Role) -> None:
        for path in self._receivers(role):
            try:
                self._socket.sendto(b"\0", path)
            except (BlockingIOError, FileNotFoundError):
                continue  # it has rings to read already, or is not there
            except ConnectionRefusedError:
                Path(path).unlink(missing_ok=True)  # its process died: a socket that is bound never refuses

    def close(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._socket)
        self._socket.close()
        self._path.unlink(missing_ok=True)

    def _receivers(self, role: Role) -> Iterable[str]:
        """Return the paths of their sockets. Every commit rings, and pathlib takes longer than all else."""
        if role == "engine":
            return (f"{self._directory}/engine.sock",)
        try:
            names = os.listdir(self._directory)
        except FileNotFoundError:
            return ()
        sockets = (name for name in names if name.startswith("api-") and name.endswith(".sock"))
        return [f"{self._directory}/{name}" for name in sockets]

    def _drain(self) -> None:
        """Empty the socket: several rings count as one."""
        try:
            while self._socket.recv(1):
                self._rung.set()
        except BlockingIOError:
            return
