"""API processes of one server on one listening socket, and their replacement one after another."""

import asyncio
import shutil
import socket
from collections.abc import Awaitable, Callable

from skyrl_tinker.directories import Directories
from skyrl_tinker.server.child_process import ChildProcess

MODULE = "skyrl_tinker.api.api_process"
METRICS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""Variable of prometheus_client: where its processes keep their counts, those of dead ones, too."""
_POLL_S = 0.05
Ended = Callable[[ChildProcess, int], Awaitable[None]]


class ApiProcesses:
    """`run` starts them and starts those again that end; `replace` asks for new ones."""

    def __init__(self, count: int, directories: Directories, listener: socket.socket, ended: Ended) -> None:
        """Prepare them. `ended` gets each that ended unasked, before it is started again."""
        self._directories = directories
        self._listener = listener
        self._ended = ended
        self._asked = asyncio.Event()
        self._places = [self._child(place) for place in range(count)]
        self._retired: list[ChildProcess] = []

    @property
    def children(self) -> tuple[ChildProcess, ...]:
        """All API processes, draining ones included."""
        return (*self._places, *self._retired)

    def replace(self) -> None:
        """Replace every process, without a moment in which none accepts connections."""
        self._asked.set()

    async def run(self) -> None:
        """Run until cancelled."""
        metrics_dir = self._directories.metrics_dir
        shutil.rmtree(metrics_dir, ignore_errors=True)  # of a server that was killed
        metrics_dir.mkdir(mode=0o700)
        async with asyncio.TaskGroup() as tasks:
            for child in self._places:
                tasks.create_task(self._keep(child))
            while True:
                await self._asked.wait()
                self._asked.clear()
                for place in range(len(self._places)):
                    await self._replace(place, tasks)

    async def _keep(self, child: ChildProcess) -> None:
        """Start it again until it is retired."""
        while not child.retired:
            code = await child.run()
            if not child.retired:
                await self._ended(child, code)
        self._retired.remove(child)

    async def _replace(self, place: int, tasks: asyncio.TaskGroup) -> None:
        """Retire a process once another listens in its place."""
        old, new = self._places[place], self._child(place)
        self._places[place] = new
        self._retired.append(old)
        tasks.create_task(self._keep(new))
        await self._until_listening(new)
        old.retire()

    async def _until_listening(self, child: ChildProcess) -> None:
        while child.pid is None or not self._directories.listening_note(child.pid).exists():  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)

    def _child(self, place: int) -> ChildProcess:
        name = f"api-{place}" if place else "api"
        environment = {METRICS_VARIABLE: str(self._directories.metrics_dir)}
        return ChildProcess(name, MODULE, self._directories, self._listener, environment)
