"""Seams of the server: what it asks of the system, patched, so that time, threads and disk are simulated."""

import asyncio
import builtins
import errno
import io
import logging
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import Context
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy.random  # noqa: F401 (it draws while it is imported)
import pytest
from sqlalchemy import URL, Connection, Engine, QueuePool, create_engine
from sqlalchemy.exc import OperationalError
from sqlalchemy.sql import selectable

from skyrl_tinker import directories
from skyrl_tinker.api import api_metrics, loop_watch
from skyrl_tinker.api.security import keyring
from skyrl_tinker.api.waiting.engine_client import EngineClient
from skyrl_tinker.engine import compose, engine
from skyrl_tinker.engine.bases import base_supervisor
from skyrl_tinker.engine.sampler import fleet
from skyrl_tinker.engine.sampler.tmpfs_spill import TmpfsSpill
from skyrl_tinker.engine.telemetry import engine_metrics
from skyrl_tinker.engine.trainer.model_returns import WAKES, ModelReturns
from skyrl_tinker.engine.trainer.model_returns import History as ModelHistory
from skyrl_tinker.engine.upkeep import upkeep_step as steps
from skyrl_tinker.errors import TrainerError
from skyrl_tinker.inference.client import remote_client
from skyrl_tinker.inference.servers.health_checks import CoreWatch
from skyrl_tinker.protocol.validation import steps as validation
from skyrl_tinker.storage import checkpoint_storage
from skyrl_tinker.storage.checkpoint_storage import CheckpointStorage
from skyrl_tinker.store.cluster import server_lease
from skyrl_tinker.store.database import postgresql, sqlite
from skyrl_tinker.store.database.abstract_database import SKEW, json_text
from skyrl_tinker.store.database.postgresql import PostgresDatabase
from tests.simulation.backends import QueuesOnly, SamplerHttp
from tests.simulation.faults import AWAY, IN_DOUBT, UNREAD, disk_full, fault, lasts, lasts_long, point
from tests.simulation.virtual_loop import PROCESS, Crash, VirtualLoop

EPOCH = 1_750_000_000.0
KEPT = frozenset({"checkpoints", "snapshots", "overflow"})
"""Directories below a home whose files cannot be read now and then, as those behind a network."""


def _clock(real: Callable[[], float], *, wall: bool) -> Callable[[], float]:
    def now() -> float:
        loop = asyncio._get_running_loop()
        if not isinstance(loop, VirtualLoop):
            return real()
        process = PROCESS.get() if wall else None
        return EPOCH + loop.time() + (0.0 if process is None else process.ahead_s)

    return now


def _returning(real: Callable[..., Any]) -> Callable[..., Any]:
    """Return what brings a model back, noting when the ranks died meanwhile."""

    async def make(self: ModelReturns, history: ModelHistory) -> None:
        process = PROCESS.get()
        assert process is not None
        deaths, of = process.server.faults.in_returns, (self, history.model.key)
        try:
            await real(self, history)
        except (TrainerError, asyncio.CancelledError):
            deaths[of] += self._trainer.broken is not None
            raise
        if deaths[of] < WAKES:
            del deaths[of]

    return make


def _random_bytes(real: Callable[[int], bytes]) -> Callable[[int], bytes]:
    def draw(count: int) -> bytes:
        loop = asyncio._get_running_loop()
        return loop.random.randbytes(count) if isinstance(loop, VirtualLoop) else real(count)

    return draw


def _at(real: Callable[..., Any], name: str, *, after: bool = False) -> Callable[..., Any]:
    """Return a function of the system with points around it, which fails while the disk is full."""

    def call(*args: Any, **options: Any) -> Any:
        point(f"before {name}")
        if name != "a removal" and disk_full():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if lasts_long(UNREAD) and _is_kept(args[0]):
            if options.get("ignore_errors"):
                return None
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        value = real(*args, **options)
        if after:
            point(f"after {name}")
        return value

    return call


def _syncing(real: Callable[[int], None]) -> Callable[[int], None]:
    def sync(descriptor: int) -> None:
        real(descriptor)
        if (process := PROCESS.get()) is not None:
            Context().run(process.server.disk.sync, descriptor)

    return sync


def _reading(real: Callable[..., Any]) -> Callable[..., Any]:
    """Return what reads a file, its size, or the names in a directory."""

    def read(path: Any = ".", *args: Any, **options: Any) -> Any:
        mode = str(args[0] if args else options.get("mode", "r"))
        known = isinstance(path, str | Path) and _is_kept(path)
        if known and (lasts(UNREAD) if mode.startswith("r") else lasts_long(UNREAD)):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(path, *args, **options)

    return read


def _is_kept(path: str | Path | int) -> bool:
    """Return whether a path, or the descriptor of a synced file, is below one of KEPT."""
    process = PROCESS.get()
    if process is None:
        return False
    name = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else str(path)
    below = name.partition(f"{process.server.home}/")[2].split("/")
    return not KEPT.isdisjoint(below) and "bucket" not in below


def _transaction(real: Callable[..., Any]) -> Callable[..., Any]:
    """Return SQLite's, with the points of a commit."""

    @contextmanager
    def transaction(conn: Connection, begin: str = sqlite.BEGIN_READ) -> Iterator[None]:
        process, writes = PROCESS.get(), begin == sqlite.BEGIN_WRITE
        conn.info[SKEW] = 0.0 if process is None else -process.ahead_s
        with real(conn, begin), _committing() if writes else nullcontext():
            if writes and process is not None and process.fence is not None:
                row = server_lease.read(conn)
                process.fence.check(None if row is None else (row.epoch,))
            yield
        if writes:
            _committed()

    return transaction


def _writing(real: Callable[..., Any]) -> Callable[..., Any]:
    """Return PostgreSQL's, with the points of a commit."""

    @contextmanager
    def writing(database: PostgresDatabase, conn: Connection) -> Iterator[None]:
        with real(database, conn), _committing():
            yield
        _committed()

    return writing


def _noting(real: Callable[..., None]) -> Callable[..., None]:
    """Return what notes the database's clock, which is as virtual as the others."""

    def note(database: PostgresDatabase, conn: Connection, now: float) -> None:
        loop = asyncio._get_running_loop()
        real(database, conn, EPOCH + loop.time() if isinstance(loop, VirtualLoop) else now)

    return note


@contextmanager
def _committing() -> Iterator[None]:
    process = PROCESS.get()
    if process is not None and process.replaced and process.fence is None:  # as that would end it
        process.kill()
        raise Crash
    yield
    point("before a commit")
    if disk_full():
        raise OperationalError("COMMIT", None, OSError("database or disk is full"))


def _committed() -> None:
    point("after a commit")
    process = PROCESS.get()
    if process is not None and process.kind == "api" and fault(IN_DOUBT):
        raise OperationalError("COMMIT", None, OSError("a copy of the database was promoted"))


def _shared(real: Callable[..., Engine]) -> Callable[..., Engine]:
    """Return a maker of PostgreSQL's engines, which share their compiled statements."""
    made: dict[str, Engine] = {}

    def engine(url: URL, *, execution_options: Mapping[str, Any], **options: Any) -> Engine:
        name = url.render_as_string(hide_password=False)
        if name not in made:
            made[name] = real(url, **options)
        return made[name].execution_options(**execution_options)

    return engine


class _Engine:
    """Engine of a file, whose connections and compiled statements stay for later histories."""

    _made: ClassVar[dict[str, Engine]] = {}

    def __init__(self, path: str, home: Path | None) -> None:
        if path not in self._made:
            self._made[path] = create_engine(
                "sqlite://",
                creator=lambda: sqlite.connect(path),
                poolclass=QueuePool,
                pool_size=32,
                max_overflow=-1,
                pool_use_lifo=True,
                json_serializer=json_text,
            )
        self._engine, self._home = self._made[path], home

    def connect(self) -> Connection:
        return self._engine.connect().execution_options(home=self._home)


class _InTurn:
    """Executor that runs all in the thread which asks."""

    map = staticmethod(map)

    def __init__(self, threads: int) -> None:
        """Begin no thread."""

    def __enter__(self) -> "_InTurn":
        return self

    def __exit__(self, *error: object) -> None:
        """Wait for nothing."""


def _in_storage(real: Callable[..., Any]) -> Callable[..., Any]:
    """Return what calls object storage, with points around each call, which fails while it is away."""

    def tried(storage: Any, action: str, place: str, call: Callable[[], Any]) -> Any:
        def passed() -> Any:
            point("before a call of storage")
            if lasts(AWAY):
                raise OSError("no route to host")
            value = call()
            point("after a call of storage")
            return value

        return real(storage, action, place, passed)

    return tried


def _sleep(real: Callable[[float], None]) -> Callable[[float], None]:
    """Return a sleep that takes no time on a VirtualLoop, where threads run on the loop."""

    def sleep(seconds: float) -> None:
        if not isinstance(asyncio._get_running_loop(), VirtualLoop):
            real(seconds)

    return sleep


def _disk_usage(path: object) -> Any:
    return SimpleNamespace(total=1 << 50, free=0 if disk_full() else 1 << 49)


def _unforeseen(*_: object, **__: object) -> None:
    """Fail the history instead of logging what an engine or API survives, and should not come to."""
    loop = asyncio._get_running_loop()
    if isinstance(loop, VirtualLoop):
        loop.errors.append({"exception": sys.exception()})


async def _no_watch(*_: object) -> None:
    """There is no Ray."""


async def _never_stuck(*_: object) -> None:
    """A sampler is dead or alive."""
    await asyncio.get_running_loop().create_future()


async def _queues(_: EngineClient, path: str) -> bytes:
    process = PROCESS.get()
    assert process is not None
    return process.server.queues()


class _Unread:
    """Metric of a server that nobody scrapes."""

    def __init__(self, *_: object, **__: object) -> None:
        """Take a name, and keep nothing."""

    def labels(self, *_: object) -> "_Unread":
        return self

    def inc(self, *_: object) -> None:
        """Count nothing."""

    dec = observe = set = set_function = inc


def install(patch: pytest.MonkeyPatch) -> None:
    """Have everything that runs on a VirtualLoop pass through here; the rest is as it was."""
    for name in ("time", "monotonic"):
        patch.setattr(time, name, _clock(getattr(time, name), wall=name == "time"))
    # It names parts of statements so, which a process keeps: draws would depend on earlier histories.
    patch.setattr(selectable, "os", SimpleNamespace(urandom=os.urandom))
    for module, name in ((os, "urandom"), (random, "_urandom")):
        patch.setattr(module, name, _random_bytes(getattr(module, name)))
    patch.setattr(os, "fsync", _at(_syncing(os.fsync), "an fsync"))
    patch.setattr(os, "rename", _at(os.rename, "a rename", after=True))
    patch.setattr(os, "link", _at(os.link, "a link"))
    patch.setattr(shutil, "rmtree", _at(shutil.rmtree, "a removal", after=True))
    reads: Any = ((Path, "stat"), (os, "listdir"), (os, "scandir"), (io, "open"))
    for owner, name in reads:
        patch.setattr(owner, name, _reading(getattr(owner, name)))
    patch.setattr(builtins, "open", io.open)
    patch.setattr(asyncio.tasks._all_tasks, "add", lambda task: None)  # nobody lists them
    patch.setattr(directories, "_SHM", Path("/nowhere"))
    patch.setattr(directories, "user_directory", lambda shared, home: home / shared.name)
    patch.setattr(shutil, "disk_usage", _disk_usage)
    patch.setattr(ModelReturns, "_make", _returning(ModelReturns._make))
    patch.setattr(TmpfsSpill, "_would_help", lambda _: True)
    patch.setattr(sqlite, "engine", _Engine)
    patch.setattr(sqlite, "transaction", _transaction(sqlite.transaction))
    patch.setattr(postgresql, "create_engine", _shared(postgresql.create_engine))
    patch.setattr(PostgresDatabase, "_note_clock", _noting(PostgresDatabase._note_clock))
    patch.setattr(server_lease, "file_of", lambda _: None)  # a file stands for a database of several hosts
    patch.setattr(PostgresDatabase, "writing", _writing(PostgresDatabase.writing))
    patch.setattr(time, "sleep", _sleep(time.sleep))
    patch.setattr(checkpoint_storage, "ThreadPoolExecutor", _InTurn)
    patch.setattr(CheckpointStorage, "_try", _in_storage(CheckpointStorage._try))
    patch.setattr(fleet, "is_here", lambda _: True)
    patch.setattr(remote_client, "JsonHttp", SamplerHttp)
    patch.setattr(compose, "EngineHttpServer", QueuesOnly)
    patch.setattr(compose, "host_memory", lambda: SimpleNamespace(available=1))  # room for one on demand
    patch.setattr(base_supervisor, "ROOM_IDLE_S", 2.0)
    patch.setattr(base_supervisor, "PAUSES_S", (0.5, 2.0, 4.0))
    patch.setattr(EngineClient, "ask", _queues)
    for module in (api_metrics, engine_metrics):
        for name in ("Counter", "Gauge", "Histogram"):
            patch.setattr(module, name, _Unread, raising=False)
    patch.setattr(logging.Logger, "exception", _unforeseen)
    patch.setattr(engine, "_watch_ray", _no_watch)
    patch.setattr(CoreWatch, "wait_stuck", _never_stuck)
    patch.setattr(engine, "freeze_gc", lambda: None)
    patch.setattr(loop_watch, "BEAT_S", 1e9)  # it measures the machine's clock
    patch.setattr(steps, "SWEEP_S", 10.0)
    patch.setattr(validation, "_TTL", (1, validation._TTL[1]))
    patch.setattr(keyring, "REFRESH_S", 1e9)
