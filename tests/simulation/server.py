"""A server on a VirtualLoop: APIs and engine as they are, each started again when it dies."""

import asyncio
import shutil
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import closing
from contextvars import Context, copy_context
from functools import cache, partial
from typing import Any, cast

import httpx
from fastapi import FastAPI
from sqlalchemy import Connection

from skyrl_tinker.api.app import make_app, make_services
from skyrl_tinker.api.waiting.engine_client import EngineUnavailableError
from skyrl_tinker.config import Settings
from skyrl_tinker.directories import Directories
from skyrl_tinker.domain.values import BaseModelFacts
from skyrl_tinker.engine.colocation.placement import SEPARATE
from skyrl_tinker.engine.compose import Backends, Environment, compose, make_samplers
from skyrl_tinker.engine.engine import Engine
from skyrl_tinker.engine.sampler.fleet import Fleet
from skyrl_tinker.engine.start_up import StartUp
from skyrl_tinker.engine.status import EngineStatus
from skyrl_tinker.engine.telemetry.engine_metrics import Metrics
from skyrl_tinker.inference.client.remote_client import RemoteInferenceClient
from skyrl_tinker.store.database.opening import open_database
from skyrl_tinker.store.doorbell import Doorbell, Role
from skyrl_tinker.store.futures import expected_requests
from skyrl_tinker.store.store import Store, write_once
from skyrl_tinker.training.trainer_group import TrainerGroup
from tests.simulation.backends import Ranks, Replicas
from tests.simulation.faults import Faults, disk_full, fault, point, travel
from tests.simulation.virtual_loop import PROCESS, Process, VirtualLoop

MOMENT_S = 4.0
"""Most time from a start to a death at some moment."""
Life = Callable[[Store], Awaitable[None]]


class Bell:
    """Doorbell of a process, where `bells` hang by the processes' names. A ring is lost now and then."""

    def __init__(self, bells: dict[str, "Bell"], name: str, role: Role) -> None:
        self._bells = bells
        self._role = role
        self._rung = asyncio.Event()
        bells[name] = self

    async def wait(self, timeout: float) -> bool:  # noqa: ASYNC109 (as the real one)
        try:
            async with asyncio.timeout(timeout):
                await self._rung.wait()
        except TimeoutError:
            return False
        self._rung.clear()
        return True

    def ring(self, role: Role) -> None:
        for bell in self._bells.values():
            if bell._role == role and not fault("a ring is lost"):
                bell._rung.set()


class Server:
    """`failure`: what ended a process that must not end by itself. `rollout_s`: time that a sample takes.

    `apis`: number of API processes; the attribute has their apps by name.
    """

    def __init__(
        self, settings: Settings, facts: BaseModelFacts, faults: Faults, rollout_s: float = 0.0, apis: int = 1
    ) -> None:
        self.faults = faults
        self.rollout_s = rollout_s
        self.engine_queues: Callable[[], bytes] | None = None
        self.replicas: Replicas
        self.ranks: Ranks
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._settings = settings
        self._facts = facts
        self._bells: dict[str, Bell] = {}
        self._processes: dict[str, Process] = {}  # by name
        self._connections: deque[tuple[float, Connection]] = (
            deque()
        )  # that one process has left, and the next one takes over
        with closing(open_database(settings.store_url, settings.root)) as database:
            self._writing = database.connect()
        self._directories = Directories(settings)
        self._directories.run_dir.mkdir()
        self._by_another_path = _links(self._directories)
        self.apis = {f"api {number}": _app(number) for number in range(apis)}
        lives: dict[str, Life] = {name: partial(self._run_api, app) for name, app in self.apis.items()}
        lives["engine"] = self._run_engine
        self._keeping = [asyncio.create_task(self._keep(name, life)) for name, life in lives.items()]

    def stop(self) -> None:
        for keeping in self._keeping:
            keeping.cancel()
        for process in self._processes.values():
            process.kill()
        for connection in (*(each for _, each in self._connections), self._writing):
            connection.close()

    def serve(self, facts: BaseModelFacts) -> None:
        """Start again, with this base model."""
        self._facts = facts
        for process in self._processes.values():
            process.kill()

    def reboot(self) -> None:
        """End all processes, and lose what is in memory; with object storage also what is on the disk."""
        for process in self._processes.values():
            process.kill()
        lost = [self._directories.ephemeral_dir]
        if self._settings.checkpoint_url is not None:
            directories = self._directories
            lost += [directories.checkpoint_root, directories.snapshot_dir, directories.overflow_dir]
        for directory in lost:
            Context().run(shutil.rmtree, directory, ignore_errors=True)

    def queues(self) -> bytes:
        if self.engine_queues is None or self._processes["engine"].dead:
            raise EngineUnavailableError
        return self.engine_queues()

    async def answer(self, request: httpx.Request) -> httpx.Response:
        """Have an API answer. Raises ConnectionError when there is none, or it dies before."""
        names = list(self.apis)
        name = self.faults.random.choice(names) if len(names) > 1 else names[0]
        process = self._processes.get(name)
        if process is None or process.dead or not process.ready:
            raise ConnectionRefusedError
        answered = asyncio.get_running_loop().create_future()
        process.connections.add(answered)
        self._spawn(process, self._handle(self.apis[name], request, answered))
        try:
            return cast(httpx.Response, await answered)
        finally:
            process.connections.discard(answered)

    async def _handle(
        self, app: FastAPI, request: httpx.Request, answered: "asyncio.Future[httpx.Response]"
    ) -> None:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        response = await transport.handle_async_request(request)
        await response.aread()
        point("before an answer")
        if not answered.done():
            answered.set_result(response)

    # Processes

    async def _keep(self, name: str, life: Life) -> None:
        kind = name.split()[0]
        while True:
            loop = cast(VirtualLoop, asyncio.get_running_loop())
            process = self._processes[name] = Process(kind, self, loop)
            self._spawn(process, self._live(process, life))
            if self.faults.due(f"{kind}: at some moment"):
                loop.call_later(self.faults.random.random() * MOMENT_S, self._strike, process)
            await process.died
            self._bells.pop(name, None)
            if kind == "api" and not self.faults.ended:
                write_once(self._settings.store_url, expected_requests.note_outage)  # as `serve` does
            await travel(1.0)

    def _strike(self, process: Process) -> None:
        if not self.faults.ended:
            process.kill()

    def _spawn(self, process: Process, work: Any) -> "asyncio.Task[None]":
        context = copy_context()
        context.run(PROCESS.set, process)
        return asyncio.get_running_loop().create_task(work, context=context)

    async def _live(self, process: Process, life: Life) -> None:
        store = Store.open(self._settings.store_url, self._settings.root)
        store._rows._idle = store._bulk._idle = self._connections
        store._writer._conn = self._writing
        try:
            await life(store)
        except Exception as error:
            starting = disk_full() and not process.ready
            if not starting and not self.failure.done():
                self.failure.set_exception(error)
        process.kill()

    async def _run_api(self, app: FastAPI, store: Store) -> None:
        process = PROCESS.get()
        assert process is not None
        name = next(name for name, each in self.apis.items() if each is app)
        bell = cast(Doorbell, Bell(self._bells, name, "api"))
        app.state.services = make_services(self._settings, store, self._facts, bell)
        async with app.router.lifespan_context(app):
            process.ready = True
            await asyncio.get_running_loop().create_future()

    async def _run_engine(self, store: Store) -> None:
        bell = cast(Doorbell, Bell(self._bells, "engine", "engine"))
        self.ranks, self.replicas = Ranks(), Replicas(self.rollout_s)
        if fault("the directories have another path"):
            self._settings = self._settings.model_copy(update=self._by_another_path)
            self._directories = Directories(self._settings)
        trainer = cast(TrainerGroup, self.ranks)
        status = EngineStatus(store, bell)
        env = Environment(self._settings, self._directories, cast(Any, None), store, bell, status, Metrics())
        for directory in (self._directories.ephemeral_dir, self._directories.checkpoint_root):
            directory.mkdir(exist_ok=True)
        await StartUp(env, self._facts, []).tidy_up()
        fleet = Fleet(self.replicas, RemoteInferenceClient(self.replicas.url, (self.replicas.url,)))
        samplers = make_samplers(self._settings, self._facts, trainer, fleet, env.metrics)
        backends = Backends(trainer, fleet, samplers, SEPARATE)
        await Engine(env)._serve(compose(env, self._facts, backends), backends)


def _links(directories: Directories) -> dict[str, str]:
    """Make links to the directories of files; returns the settings that name those."""
    links = directories.home / "links"
    for name, directory in (
        ("checkpoints", directories.checkpoint_root),
        ("snapshots/models", directories.snapshot_dir),
        ("snapshots/unnamed", directories.overflow_dir),
    ):
        directory.mkdir()
        (links / name).parent.mkdir(parents=True, exist_ok=True)
        (links / name).symlink_to(directory)
    return {"checkpoints": str(links / "checkpoints"), "snapshots": str(links / "snapshots")}


@cache
def _app(number: int) -> FastAPI:
    """Build each once, as it takes as long as ten histories: of the settings it needs the limits only."""
    return make_app(Settings())
