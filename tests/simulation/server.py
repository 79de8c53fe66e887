"""A server on a VirtualLoop: APIs and engine as they are, each started again when it dies."""

import asyncio
import itertools
import shutil
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing
from contextvars import Context, copy_context
from functools import cache, partial
from random import Random
from types import MappingProxyType
from typing import Any, cast
from unittest.mock import patch

from fastapi import FastAPI
from sqlalchemy import Connection

from skyrl_tinker.api.app import make_app, make_services
from skyrl_tinker.api.waiting.engine_client import EngineUnavailableError
from skyrl_tinker.config import Settings
from skyrl_tinker.directories import Directories
from skyrl_tinker.domain.bases import Bases
from skyrl_tinker.domain.values import BaseModelFacts
from skyrl_tinker.engine.bases.base_runtime import BaseRuntime, ReportParts
from skyrl_tinker.engine.bases.base_supervisor import _IS_UP, BaseSupervisor, _RunState
from skyrl_tinker.engine.colocation.placement import SEPARATE
from skyrl_tinker.engine.compose import Environment, compose, make_samplers
from skyrl_tinker.engine.engine import Engine
from skyrl_tinker.engine.sampler.samplers import Samplers
from skyrl_tinker.engine.start_up import StartUp
from skyrl_tinker.engine.status import EngineStatus
from skyrl_tinker.engine.telemetry.engine_metrics import Metrics
from skyrl_tinker.errors import (
    LeaseLostError,
    SamplerError,
    SkyrlTinkerError,
    StartupError,
    WeightsAwayError,
    root_cause,
)
from skyrl_tinker.protocol.schemas.administration import ChangeBaseRequest
from skyrl_tinker.storage.checkpoint_storage import open_storage
from skyrl_tinker.store.cluster.server_lease import Lease, own_epoch
from skyrl_tinker.store.database.abstract_database import LeaseFence
from skyrl_tinker.store.database.opening import open_database
from skyrl_tinker.store.doorbell import Doorbell, Role
from skyrl_tinker.store.futures import expected_requests
from skyrl_tinker.store.store import Store, write_once
from skyrl_tinker.training.trainer_group import TrainerGroup
from tests.simulation.asgi_call import Answer, HttpRequest, call
from tests.simulation.backends import Ranks, Replicas, Router
from tests.simulation.disk import Disk
from tests.simulation.faults import Faults, disk_full, fault, is_unread, point, travel
from tests.simulation.virtual_loop import PROCESS, Crash, Process, VirtualLoop
from tests.support.sampler_clients import opened_fleet, vllm_client
from tests.support.scripted_replica import Draw

MOMENT_S = 4.0
"""Most time from a start to a death at some moment."""
STILL_S = 40.0
"""Most time for which an engine stands still that another one has replaced."""
AHEAD_S = (0.0, 45.0, -90.0, 3600.0, -7200.0)
"""By how much a wall clock may be ahead of the database's."""
STARTED_S = 3.0
"""Most time that processes take to start or to end."""
BEAT_S = 2.0
"""Time between two beats of the holder of the lease."""
NO_CLOCKS: Mapping[str, float] = MappingProxyType({})
Life = Callable[[Store], Awaitable[None]]


class Bell(Doorbell):
    """Doorbell of a process, where `bells` hang by the processes' names. A ring is lost now and then."""

    def __init__(self, bells: dict[str, "Bell"], name: str, role: Role) -> None:
        super().__init__()
        self._bells = bells
        self._role = role
        bells[name] = self

    def ring(self, role: Role) -> None:
        for bell in self._bells.values():
            if bell._role == role and not fault("a ring is lost"):
                bell._rung.set()

    def close(self) -> None:
        """Hang on."""


class Host:
    """A machine with a home of its own, and what one process there has left and the next one takes over.

    `ahead_s`: wall clocks of its processes before the database's, by name; those of APIs may be on others.
    """

    def __init__(self, settings: Settings, ahead_s: Mapping[str, float] = NO_CLOCKS) -> None:
        """Start it; where clocks differ, take the lease."""
        self.use(settings)
        self.ahead_s = ahead_s
        self.directories.run_dir.mkdir(parents=True)
        self.late: Process | None = None  # its engine, once another host has taken over
        if ahead_s:
            seconds = itertools.count()  # of a moment in which the holder is silent
            self.lease = Lease(settings.store_url, settings.root, lambda: next(seconds), lambda _: None)
            self.lease.take(lambda _: None, standby=True)
        self.connections: deque[tuple[float, Connection]] = deque()
        with closing(open_database(settings.store_url, settings.root)) as database:
            self.writing = database.connect()

    def use(self, settings: Settings) -> None:
        self.settings, self.directories = settings, Directories(settings)


class Server:
    """`failure`: what ended a process that must not end by itself. `rollout_s`: time that a sample takes.

    `apis`: number of API processes; the attribute has their apps by name. `clocks`: draws by how much they
    differ. `bases`: the first has so many `samplers`, a router before several; further ones have one, which
    draws by `draws` if it is not trained. `idle_s`: of those on demand, by name. `crowded`: one of these runs
    at a time.
    """

    def __init__(
        self,
        settings: Settings,
        bases: tuple[BaseModelFacts, ...],
        faults: Faults,
        rollout_s: float = 0.0,
        apis: int = 1,
        clocks: Random | None = None,
        samplers: int = 1,
    ) -> None:
        self.faults = faults
        self.rollout_s = rollout_s
        self._samplers = samplers
        self.draws: dict[str, Draw] = {}
        self.idle_s: dict[str, float] = {}
        self.crowded = False
        self.engine_queues: Callable[[], bytes] | None = None
        self.change_base: Callable[[ChangeBaseRequest], str] = lambda _: ""
        self.ranks: dict[str, Ranks] = {}  # of those trained
        self.disk = Disk()
        self.home = settings.root.parent  # of all hosts
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.bases = bases
        self._bells: dict[str, Bell] = {}
        self._processes: dict[str, Process] = {}  # by name
        self._replaced: list[Process] = []
        self._clocks = clocks
        self.apis = {f"api {number}": _app(number) for number in range(apis)}
        self._host = Host(settings, self._ahead_s())
        self._hosts = [self._host]
        self._by_another_path = _links(self._host.directories)
        lives: dict[str, Life] = {name: partial(self._run_api, app) for name, app in self.apis.items()}
        lives["engine"] = self._run_engine
        self._keeping = [asyncio.create_task(self._keep(name, life)) for name, life in lives.items()]
        self._start_beats()

    @property
    def directories(self) -> Directories:
        return self._host.directories

    def stop(self) -> None:
        for keeping in self._keeping:
            keeping.cancel()
        self._kill_all()
        for host in self._hosts:
            for connection in (*(each for _, each in host.connections), host.writing):
                connection.close()

    def _kill_all(self) -> None:
        for process in (*self._processes.values(), *self._replaced):
            process.kill()

    def serve(self, bases: tuple[BaseModelFacts, ...]) -> None:
        """Start again, with these base models."""
        self.bases = bases
        self._kill_all()

    def take_over(self, engine: Process) -> None:
        """Have another server take over, while this engine stands still; it goes on later."""
        if engine.dead or engine.replaced:
            return
        loop = asyncio.get_running_loop()
        engine.replaced, engine.still_until = True, loop.time() + self.faults.random.random() * STILL_S
        self._replaced.append(engine)
        for process in self._processes.values():
            if process is not engine:
                process.kill()
        home = self._host.settings.home.with_name(f"host {len(self._hosts)}")
        self._host.late = engine
        self._host = Host(self._host.settings.model_copy(update={"home": home}), self._ahead_s())
        self._hosts.append(self._host)
        self._start_beats()
        engine.died.set_result(None)

    def _ahead_s(self) -> Mapping[str, float]:
        if self._clocks is None:
            return NO_CLOCKS
        return {name: self._clocks.choice(AHEAD_S) for name in ("engine", *self.apis)}

    def _start_beats(self) -> None:
        if self._host.ahead_s:
            self._keeping.append(asyncio.create_task(self._keep_lease(self._host)))

    async def _keep_lease(self, host: Host) -> None:
        """Count beats, as `serve` does, which ends its engine once another server has taken over."""
        loop = asyncio.get_running_loop()
        while host.late is None or not host.late.dead:
            await asyncio.sleep(BEAT_S)
            if host.late is not None and loop.time() < host.late.still_until + BEAT_S:
                continue  # it stands still, too, or is as late
            try:
                host.lease.keep()
            except LeaseLostError as error:
                if host.late is not None:
                    host.late.kill()
                elif not self.failure.done():
                    self.failure.set_exception(error)

    def reboot(self) -> None:
        """End all processes; lose what is in memory and not synced, with object storage all of the disk."""
        for process in self._processes.values():
            process.kill()
        directories = self._host.directories
        lost, kept = [directories.ephemeral_dir], []
        on_disk = [directories.checkpoint_root, directories.snapshot_dir, directories.overflow_dir]
        (kept if self._host.settings.checkpoint_url is None else lost).extend(on_disk)
        for directory in lost:
            Context().run(shutil.rmtree, directory, ignore_errors=True)
        Context().run(self.disk.cut_power, [each for each in kept if each.exists()])

    def queues(self) -> bytes:
        if self.engine_queues is None or self._processes["engine"].dead:
            raise EngineUnavailableError
        return self.engine_queues()

    async def answer(self, request: HttpRequest) -> Answer:
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
            return cast(Answer, await answered)
        finally:
            process.connections.discard(answered)

    async def _handle(self, app: FastAPI, request: HttpRequest, answered: "asyncio.Future[Answer]") -> None:
        answer = await call(app, request)
        point("before an answer")
        if not answered.done():
            answered.set_result(answer)

    # Processes

    async def _keep(self, name: str, life: Life) -> None:
        kind = name.split()[0]
        while True:
            loop = cast(VirtualLoop, asyncio.get_running_loop())
            process = self._processes[name] = Process(kind, self, loop)
            process.ahead_s = self._host.ahead_s.get(name, 0.0)
            self._spawn(process, self._live(process, life))
            if self.faults.due(f"{kind}: at some moment"):
                loop.call_later(self.faults.random.random() * MOMENT_S, self._strike, process)
            await process.died
            self._bells.pop(name, None)
            if kind == "api" and not self.faults.ended:
                write_once(self._host.settings.store_url, expected_requests.note_outage)  # as `serve` does
            await travel(1.0)

    def _strike(self, process: Process) -> None:
        if not self.faults.ended:
            process.kill()

    def _spawn(self, process: Process, work: Any) -> "asyncio.Task[None]":
        context = copy_context()
        context.run(PROCESS.set, process)
        return asyncio.get_running_loop().create_task(work, context=context)

    async def _live(self, process: Process, life: Life) -> None:
        host = self._host
        url, root = host.settings.store_url, host.settings.root
        if host.ahead_s and process.kind == "engine":
            epoch = own_epoch(url, root)
            assert epoch is not None
            process.fence = LeaseFence(epoch, partial(_end, process))
        store = Store.open(url, root, process.fence)
        store._database.skew_s = -process.ahead_s  # SQLite asks for no time
        store._rows._idle = store._bulk._idle = store._reports._idle = host.connections
        store._writer._conn = host.writing
        try:
            await life(store)
        except Exception as error:
            starting = (disk_full() and not process.ready) or (
                is_unread(root_cause(error)) and not process.is_up()
            )
            if not starting and not process.replaced and not self.failure.done():
                self.failure.set_exception(error)
        process.kill()

    async def _run_api(self, app: FastAPI, store: Store) -> None:
        process = PROCESS.get()
        assert process is not None
        name = next(name for name, each in self.apis.items() if each is app)
        bell = Bell(self._bells, name, "api")
        app.state.services = make_services(self._host.settings, store, Bases(self.bases), bell)
        async with app.router.lifespan_context(app):
            process.ready = True
            await asyncio.get_running_loop().create_future()

    async def _run_engine(self, store: Store) -> None:
        process, host = PROCESS.get(), self._host
        assert process is not None
        bell = Bell(self._bells, "engine", "engine")
        if fault("the directories have another path"):
            host.use(host.settings.model_copy(update=self._by_another_path))
        settings, directories = host.settings, host.directories
        status = EngineStatus(store, bell)
        env = Environment(settings, directories, cast(Any, None), store, bell, status, Metrics())
        for directory in (directories.ephemeral_dir, directories.checkpoint_root):
            directory.mkdir(exist_ok=True)
        runtimes = [self._runtime(env, process, facts) for facts in self.bases]
        parts = compose(env, runtimes)
        process.is_up = lambda: parts.statuses.ready
        process.is_changing = lambda: any(map(_is_changing, parts.bases))
        await Engine(env)._serve(parts, StartUp(env, Bases(self.bases), []))

    def _runtime(self, env: Environment, process: Process, facts: BaseModelFacts) -> BaseRuntime:
        settings, first = env.settings, facts is self.bases[0]
        if first:
            replicas = Replicas(self.rollout_s, self._samplers)
            process.router = Router(replicas.urls) if self._samplers > 1 else None
        else:
            replicas = Replicas(self.rollout_s, of=facts.name, draw=self.draws.get(facts.name))
        process.fleets.append(replicas)
        trainer, router = None, process.router if first else None
        if facts.trainable:
            self.ranks[facts.name] = Ranks(replicas, further=not first)
            trainer = cast(TrainerGroup, self.ranks[facts.name])
        fleet = opened_fleet(vllm_client("", replicas.urls), replicas, router)
        with patch("skyrl_tinker.engine.compose.CHUNK_BYTES", 0):  # a tensor is a chunk
            storage = open_storage(settings.checkpoint_root, settings.checkpoint_url)
            samplers = make_samplers(settings, facts, trainer, fleet, env.metrics, storage)
        idle_s = self.idle_s.get(facts.name)
        ranks, size = self.ranks.get(facts.name), int(self.crowded and not first)
        started = Started(samplers, replicas, ranks, further=not first, on_demand=idle_s is not None)
        return BaseRuntime(settings, facts, trainer, samplers, storage, SEPARATE, started, idle_s, size)


class Started:
    """Processes that are up, until they end; those on demand are not at first."""

    parts, pids = ("all",), ()

    def __init__(
        self,
        samplers: Samplers,
        replicas: Replicas,
        ranks: Ranks | None,
        *,
        further: bool,
        on_demand: bool,
    ) -> None:
        """Take its parts. None of a base model on demand has a router. `further`: its starts may fail."""
        self._samplers = samplers
        self._replicas = replicas
        self._ranks = ranks
        self._further = further
        self._down = on_demand
        if on_demand:
            self._lose()

    async def start(self, report: ReportParts) -> None:
        if self._down:
            point("before a start")
            await travel(STARTED_S)
            if self._ranks is not None:
                await self._ranks.ready()
        self._fail("weights are not here yet", WeightsAwayError("its weights are still fetched"))
        self._fail("a start fails", SamplerError("sampler: it ended while starting"))
        if self._down:
            self._replicas.begin()
            self._samplers.fleet.open(self._replicas, self._replicas.urls, None)
            self._down = False
            point("after a start")
        await report(())

    async def check(self) -> None:
        self._fail("a check fails", StartupError("trainer and sampler differ"))

    def _fail(self, name: str, error: SkyrlTinkerError) -> None:
        if self._further and fault(name):
            raise error

    async def end(self) -> None:
        point("before an end")
        self._lose()
        self._down = True
        await travel(STARTED_S)
        point("after an end")

    def _lose(self) -> None:
        self._samplers.fleet.close()
        self._replicas.lose()
        self._samplers.reset()
        if self._ranks is not None:
            self._ranks.lose()


def _is_changing(base: BaseSupervisor) -> bool:
    """Return whether a base model on demand starts, brings models back, or ends."""
    if base._runtime.idle_s is None:
        return False
    phase, runs = base._statuses._bases()[base.name][0], base._state in _IS_UP.values()
    if phase == "failed":  # until it has started
        return base._state is _RunState.STARTING
    return phase != ("ready" if runs else "stopped")


def _end(process: Process, _: str) -> None:
    process.kill()
    raise Crash


def _links(directories: Directories) -> dict[str, str]:
    """Make links to the directories of files; returns the settings that name those."""
    links = directories.checkpoint_root.parent / "links"  # outside of homes that are not shared
    for name, directory in (
        ("checkpoints", directories.checkpoint_root),
        ("snapshots/models", directories.snapshot_dir),
        ("snapshots/unnamed", directories.overflow_dir),
    ):
        directory.mkdir(parents=True)
        (links / name).parent.mkdir(parents=True, exist_ok=True)
        (links / name).symlink_to(directory)
    return {"checkpoints": str(links / "checkpoints"), "snapshots": str(links / "snapshots")}


@cache
def _app(number: int) -> FastAPI:
    """Build each once, as it takes as long as ten histories: of the settings it needs the limits only."""
    return make_app(Settings())
