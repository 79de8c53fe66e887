"""Starts, watches, restarts and ends every child process of a server."""

import asyncio
import os
import signal
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import InitVar, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError

from skyrl_tinker.config import Settings
from skyrl_tinker.directories import LOG_BYTES, Directories
from skyrl_tinker.domain.bases import Bases
from skyrl_tinker.domain.weight_files import listed_weights
from skyrl_tinker.errors import LeaseLostError, StartupError
from skyrl_tinker.server import child_process, preflight, shared_settings, start_plan
from skyrl_tinker.server.addresses import local_url
from skyrl_tinker.server.announcement import StartPhases, announcement
from skyrl_tinker.server.api_processes import ApiProcesses
from skyrl_tinker.server.base_models import catalog
from skyrl_tinker.server.child_process import DEATHS_WITHIN_S, MOST_DEATHS, ChildProcess
from skyrl_tinker.store import api_keys, server_state
from skyrl_tinker.store.cluster.server_lease import Lease
from skyrl_tinker.store.database.abstract_database import LeaseFence
from skyrl_tinker.store.database.migrate import is_migrated, migrate
from skyrl_tinker.store.futures import expected_requests
from skyrl_tinker.store.store import Store, write_once
from skyrl_tinker.system import processes
from skyrl_tinker.system.atomic_directory import write_file
from skyrl_tinker.system.process_lock import process_lock

_STOP_S = 10.0  # children that have not ended by then are killed; the whole server ends within 15 s
_KILL_GRACE_S = 2.0
_RECORD_S = 2.0
_STOPPED_ROUNDS = 3  # of _RECORD_S, after which a process that stands still is killed
_BACK_OFF_S = 5.0  # before an API that keeps dying is started again
_FETCH_AGAIN_S = 30.0  # before the download of further base models that failed is tried again
_READY_POLL_S = 0.1

Report = Callable[[str], None]


def serve(settings: Settings, ready: Report, progress: Report, warn: Report) -> None:
    """Run a server until SIGTERM or Ctrl-C.

    `ready` receives the announcement once, `progress` the server's steps until then, and later its
    care for parts that died, `warn` messages for every user.

    Raises StartupError when it cannot start, or when a child keeps dying; no process is left running then.
    """
    preflight.check_settings(settings)
    preflight.check_room(settings.root)
    preflight.check_storage(settings)
    settings = start_plan.place(settings, progress)
    preflight.check_placement(settings)
    directories = Directories(settings)
    directories.make()
    with process_lock(directories.server_lock, "server"):
        processes.become_subreaper()
        processes.raise_open_files_limit()
        if left := processes.end_leftovers(directories.pid_file, _KILL_GRACE_S):
            progress(f"ended {left} processes left by a killed server")
        directories.delete_orphaned()
        settings = settings.model_copy(update={"home": directories.home})
        bases = catalog.resolve_all(settings)
        with closing(_take_database(settings, progress)) as lease:
            preflight.claim_storage(settings)
            preflight.check_host(settings)
            with preflight.listen(settings.host, settings.port) as listener:
                settings = settings.model_copy(update={"port": listener.getsockname()[1]})
                write_file(directories.settings_file, settings.model_dump_json())
                supervisor = _Supervisor(settings, directories, bases, listener, lease, ready, progress, warn)
                asyncio.run(supervisor.run())


def _take_database(settings: Settings, progress: Report) -> Lease:
    """Take the lease, where there are tables before they are migrated under another server."""
    if not is_migrated(settings.store_url):
        migrate(settings.store_url, settings.root)
    if settings.standby:
        write_once(settings.store_url, partial(shared_settings.require_same_places, own=settings))
    lease = Lease(settings.store_url, settings.root)
    lease.take(progress, standby=settings.standby)
    migrate(settings.store_url, settings.root)
    return lease


@dataclass(eq=False)
class _Supervisor:
    _settings: Settings
    _directories: Directories
    _bases: Bases
    listener: InitVar[socket.socket]
    _lease: Lease
    _ready: Report
    _progress: Report
    _warn: Report

    def __post_init__(self, listener: socket.socket) -> None:
        self._download, self._further_download = (
            ChildProcess(
                "download",
                "skyrl_tinker.server.base_models.weights_download",
                self._directories,
                arguments=[facts.hub_name for facts in bases if facts.hub_name is not None],
            )
            for bases in (self._bases.all[:1], self._bases.all[1:])
        )
        self._first_here = asyncio.Event()  # the weights of the first base model
        self._apis = ApiProcesses(self._settings.api_processes, self._directories, listener, self._on_api_end)
        self._engine = ChildProcess("engine", "skyrl_tinker.engine.engine_process", self._directories)
        self._was_ready = False
        self._told = ""
        self._stop = asyncio.Event()
        self._kill = asyncio.Event()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._on_signal)
        loop.add_signal_handler(signal.SIGUSR2, self._on_renewal)
        epoch = self._lease.epoch
        fence = None if epoch is None else LeaseFence(epoch)
        store = Store.open(self._settings.store_url, self._settings.root, fence)
        try:
            await self._run_children(store)
        except ExceptionGroup as failures:
            if isinstance(failures.exceptions[0], LeaseLostError):
                self._kill.set()
            raise failures.exceptions[0] from None
        finally:
            await self._end_children()
            with suppress(LeaseLostError):
                await self._set_engine_state(store, "starting", "the server was stopped, none has started")
            await store.close()
            self._directories.pid_file.unlink(missing_ok=True)
            self._directories.delete_temporary()

    def _on_signal(self) -> None:
        """Stop at the first signal, kill at the second."""
        (self._kill if self._stop.is_set() else self._stop).set()

    def _on_renewal(self) -> None:
        self._progress("replacing the API processes, one after another (SIGUSR2)")
        self._apis.replace()

    async def _run_children(self, store: Store) -> None:
        await store.write(partial(server_state.put_bases, bases=self._bases))
        await store.write(partial(shared_settings.publish, settings=self._settings))
        own = {"pid": os.getpid(), "started_at": psutil.Process().create_time()}
        await store.write(lambda conn: server_state.put(conn, server_state.SERVER, own))
        await store.write(expected_requests.note_outage)
        await self._set_engine_state(store, "starting", "starting the engine")
        rotate_logs = partial(child_process.rotate, self._directories.log_dir, LOG_BYTES)
        async with asyncio.TaskGroup() as tasks:
            work = [
                tasks.create_task(self._apis.run()),
                tasks.create_task(self._keep_engine(store)),
                tasks.create_task(self._fetch_further()),
                tasks.create_task(self._announce_ready(store)),
                tasks.create_task(_repeat(self._lease.keep, OperationalError)),  # raises LeaseLostError
                tasks.create_task(self._record_processes()),
                tasks.create_task(self._kill_stopped()),
                tasks.create_task(_repeat(rotate_logs, OSError)),
                tasks.create_task(self._report_changes(store)),
            ]
            await self._stop.wait()
            for task in work:
                task.cancel()

    @property
    def _children(self) -> tuple[ChildProcess, ...]:
        return (self._download, self._further_download, self._engine, *self._apis.children)

    async def _on_api_end(self, api: ChildProcess, code: int) -> None:
        """Have the API restarted for ever once it has been ready: the engine and its models need no API."""
        with suppress(OperationalError):  # the database may fail for a short time
            await asyncio.to_thread(write_once, self._settings.store_url, expected_requests.note_outage)
        try:
            self._report_death(api, code)
        except StartupError:
            if not self._was_ready:
                raise
            await asyncio.sleep(_BACK_OFF_S)

    async def _keep_engine(self, store: Store) -> None:
        if self._download.arguments:
            await self._fetch_weights(store)
        self._first_here.set()
        while True:
            code = await self._engine.run()
            self._told = f"the engine ended ({_ending(code)})"
            await self._set_engine_state(store, "restarting", self._told)
            await asyncio.to_thread(processes.end_processes, self._engine_leftovers(), _KILL_GRACE_S)
            self._report_death(self._engine, code)

    async def _fetch_weights(self, store: Store) -> None:
        """Fetch the first base model's while the API listens; an interrupted download goes on."""
        while code := await self._download.run():
            self._report_death(self._download, code)
            await asyncio.sleep(_BACK_OFF_S)
        listed_weights(Path(self._bases.first.directory))
        await self._set_engine_state(store, "starting", "starting the engine")

    async def _fetch_further(self) -> None:
        """Fetch weights of further base models while others serve: each starts once it has its own."""
        await self._first_here.wait()
        while self._further_download.arguments and (code := await self._further_download.run()):
            said = child_process.last_line(self._further_download.log)
            self._progress(
                f"the download ended ({_ending(code)}), it goes on in {_FETCH_AGAIN_S:.0f} s: {said}"
            )
            await asyncio.sleep(_FETCH_AGAIN_S)

    def _report_death(self, child: ChildProcess, code: int) -> None:
        """Report that a child died. Raises StartupError when it keeps dying."""
        said = f"last line of its log: {child_process.last_line(child.log)} (see {child.log})"
        if child.dies_too_often(code):
            raise StartupError(
                f"the {child.name} died {MOST_DEATHS} times within {DEATHS_WITHIN_S:.0f} s, giving up; "
                + said
            )
        self._progress(f"the {child.name} ended ({_ending(code)}), starting it again; {said}")

    def _engine_leftovers(self) -> list[psutil.Process]:
        """Return all descendants but other children: those of a dead engine are now ours, the subreaper's."""
        own = {child.pid for child in self._children if child is not self._engine}
        return [process for process in processes.descendants() if process.pid not in own]

    async def _set_engine_state(self, store: Store, name: str, detail: str) -> None:
        value = {"state": name, "detail": detail}
        with suppress(OperationalError):  # a full disk: the next engine will report its own state
            await store.write(lambda conn: server_state.put(conn, "engine", value))

    async def _announce_ready(self, store: Store) -> None:
        """Poll /readyz and report once it is 200. Raises StartupError when the engine has failed."""
        phases = StartPhases(self._progress)
        # The certificate names the server as its clients know it, not the address used here.
        async with httpx.AsyncClient(trust_env=False, timeout=5.0, verify=False) as client:
            while (status := await _readiness(client, self._settings)) is not None:
                if status.get("state") == "failed":
                    raise StartupError(status["detail"])
                phases.note(status.get("detail"))
                await asyncio.sleep(_READY_POLL_S)
        self._was_ready = True
        failed, keys = await store.read(_failed_bases), await store.read(api_keys.count_keys) > 0
        self._ready(announcement(self._settings, self._bases, failed, keys=keys))

    async def _record_processes(self) -> None:
        """Keep the pid file current, for the next server if this one is killed, and reap dead orphans."""
        recorded: set[processes.Identity] = set()
        while True:
            processes.reap_orphans(known=[child.pid or 0 for child in self._children])
            running = processes.identities(processes.descendants())
            if running != recorded:
                with suppress(OSError):  # a full disk: tried again
                    processes.write_pid_file(self._directories.pid_file, running)
                    recorded = running
            await asyncio.sleep(_RECORD_S)

    async def _kill_stopped(self) -> None:
        """Kill a process that stands still: its peers take it for busy, but replace it once it is dead."""
        rounds: Counter[psutil.Process] = Counter()
        while True:
            rounds = Counter({process: rounds[process] + 1 for process in processes.list_stopped()})
            for process in [process for process, seen in rounds.items() if seen == _STOPPED_ROUNDS]:
                self._progress(f"process {process.pid} stands still (SIGSTOP), killing it")
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            await asyncio.sleep(_RECORD_S)

    async def _report_changes(self, store: Store) -> None:
        """Report the standing warning and, after the first start, the state, each time that they change.

        An end of the engine is not reported: `_report_death` does that.
        """
        warned, stated = await store.read(_warning), ""
        while True:
            await asyncio.sleep(_RECORD_S)
            with suppress(OperationalError):  # the database may fail for a short time
                warning, state = await store.read(_warning), await store.read(_engine_state)
                if warning is not None and warning != warned:
                    self._warn(warning)
                if self._was_ready and stated and state not in (stated, self._told):
                    self._progress(state)
                warned, stated = warning, state if self._was_ready else ""

    async def _end_children(self) -> None:
        running = [child.process for child in self._children if child.process and child.pid]
        for process in running:
            process.send_signal(signal.SIGTERM)
        ends = asyncio.gather(*(process.wait() for process in running))
        killed = asyncio.create_task(self._kill.wait())
        await asyncio.wait((ends, killed), timeout=_STOP_S, return_when=asyncio.FIRST_COMPLETED)
        killed.cancel()
        processes.kill_descendants(0.0 if self._kill.is_set() else _KILL_GRACE_S)
        await ends


async def _repeat(work: Callable[[], None], tolerated: type[Exception]) -> None:
    """Work in a thread every _RECORD_S. `tolerated`: faults of the database, or of a full disk."""
    while True:
        with suppress(tolerated):
            await asyncio.to_thread(work)
        await asyncio.sleep(_RECORD_S)


def _warning(conn: Connection) -> str | None:
    return server_state.get(conn, server_state.WARNING)


def _engine_state(conn: Connection) -> str:
    state: Any = server_state.get(conn, "engine")
    return "the engine is ready again" if state["state"] == "ready" else str(state["detail"])


def _failed_bases(conn: Connection) -> dict[str, str]:
    """Return why base models do not start, by name."""
    state: Any = server_state.get(conn, "engine")
    told = state.get("base_models", {}).items()
    return {name: detail for name, (phase, detail) in told if phase == "failed"}


async def _readiness(client: httpx.AsyncClient, settings: Settings) -> dict[str, str] | None:
    """Return the status from /readyz, empty where it does not answer; None when it is ready."""
    try:
        response = await client.get(f"{local_url(settings)}/readyz")
    except httpx.TransportError:
        return {}
    if response.status_code == httpx.codes.OK:
        return None
    content = response.json()
    return content if isinstance(content, dict) else {}


def _ending(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
