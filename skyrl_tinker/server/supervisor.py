"""Starts, watches, restarts and ends every child process of a server."""

import asyncio
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx
import psutil
from sqlalchemy.exc import OperationalError

from skyrl_tinker import processes
from skyrl_tinker.config import Settings
from skyrl_tinker.directories import Directories
from skyrl_tinker.domain.values import BaseModelFacts
from skyrl_tinker.errors import StartupError
from skyrl_tinker.server import base_model, preflight
from skyrl_tinker.store import server_state
from skyrl_tinker.store.database.migrate import migrate
from skyrl_tinker.store.futures import queue
from skyrl_tinker.store.store import Store

_STOP_S = 10.0  # children end themselves within this, or are killed; the promise for everything is 15 s
_KILL_GRACE_S = 2.0
_RECORD_S = 2.0
_READY_POLL_S = 0.1
_MOST_DEATHS, _DEATHS_WITHIN_S = 5, 120.0

Say = Callable[[str], None]


def serve(settings: Settings, ready: Say, progress: Say, warn: Say) -> None:
    """Run a server until SIGTERM or Ctrl-C.

    `ready` gets the URL once, `progress` news while starting, `warn` what every user should know.

    Raises StartupError when it cannot start, or when a child keeps dying; nothing is left running then.
    """
    preflight.check_settings(settings)
    places = Directories(settings)
    places.make()
    with preflight.home_lock(places):
        processes.become_subreaper()
        processes.raise_open_files_limit()
        if left := processes.end_leftovers(places.pid_file, _KILL_GRACE_S):
            progress(f"ended {left} processes that a killed server had left")
        places.sweep_forgotten()
        migrate(settings.store_url)
        preflight.check_host(settings)
        with preflight.listen(settings.host, settings.port) as listener:
            update = {"home": places.home, "port": listener.getsockname()[1]}
            settings = settings.model_copy(update=update)
            facts = base_model.resolve(settings)
            places.settings_file.write_text(settings.model_dump_json())
            asyncio.run(_Supervisor(settings, places, facts, listener, ready, progress, warn).run())


@dataclass(slots=True)
class _Child:
    """A child process in its own session, so that Ctrl-C in a terminal reaches only `serve`.

    Its temporary files lie beside the sockets and go with them: a killed vLLM leaves some behind.
    """

    name: str
    module: str
    places: Directories
    listener: socket.socket | None = None  # inherited, and named by its number as the last argument
    process: asyncio.subprocess.Process | None = None
    deaths: deque[float] = field(default_factory=lambda: deque(maxlen=_MOST_DEATHS))

    @property
    def log(self) -> Path:
        return self.places.log_dir / f"{self.name}.log"

    async def run(self) -> int:
        """Start it and wait for its end; its exit code, negative for a signal."""
        inherited = () if self.listener is None else (self.listener.fileno(),)
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", self.module, str(self.places.settings_file), *map(str, inherited)),
                pass_fds=inherited,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=processes.die_with_parent,
                env={**os.environ, "PYTHONUNBUFFERED": "1", "TMPDIR": str(self.places.bell_dir)},
            )
        return await self.process.wait()

    @property
    def pid(self) -> int | None:
        """None unless it runs."""
        return self.process.pid if self.process and self.process.returncode is None else None

    def dies_too_often(self) -> bool:
        """Count one death."""
        self.deaths.append(time.monotonic())
        return len(self.deaths) == _MOST_DEATHS and self.deaths[-1] - self.deaths[0] < _DEATHS_WITHIN_S

    def last_words(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip() if lines else "nothing in its log"


class _Supervisor:
    def __init__(
        self,
        settings: Settings,
        places: Directories,
        facts: BaseModelFacts,
        listener: socket.socket,
        ready: Say,
        progress: Say,
        warn: Say,
    ) -> None:
        self._settings = settings
        self._places = places
        self._facts = facts
        self._ready = ready
        self._progress = progress
        self._warn = warn
        self._api = _Child("api", "skyrl_tinker.api.api_process", places, listener)
        self._engine = _Child("engine", "skyrl_tinker.engine.engine_process", places)
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._on_signal)
        store = await Store.open(self._settings.store_url)
        try:
            await self._run_children(store)
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            await self._end_children()
            await store.close()
            self._places.pid_file.unlink(missing_ok=True)
            self._places.forget_temporary()

    def _on_signal(self) -> None:
        """The first asks to stop, the second kills."""
        (self._hurry if self._stop.is_set() else self._stop).set()

    async def _run_children(self, store: Store) -> None:
        await store.write(lambda conn: server_state.put(conn, "base_model", asdict(self._facts)))
        await self._set_engine_state(store, "starting", "starting the engine")
        async with asyncio.TaskGroup() as tasks:
            work = [
                tasks.create_task(self._keep_api()),
                tasks.create_task(self._keep_engine(store)),
                tasks.create_task(self._announce()),
                tasks.create_task(self._record_processes()),
                tasks.create_task(self._pass_on_warnings(store)),
            ]
            await self._stop.wait()
            for task in work:
                task.cancel()

    async def _keep_api(self) -> None:
        while True:
            self._mourn(self._api, await self._api.run())

    async def _keep_engine(self, store: Store) -> None:
        while True:
            code = await self._engine.run()
            await self._set_engine_state(store, "restarting", f"the engine ended ({_ending(code)})")
            await asyncio.to_thread(processes.end_processes, self._engine_leftovers(), _KILL_GRACE_S)
            self._mourn(self._engine, code)

    def _mourn(self, child: _Child, code: int) -> None:
        """Say that a child died. StartupError when it keeps dying."""
        self._progress(f"the {child.name} ended ({_ending(code)}), starting it again; see {child.log}")
        if child.dies_too_often():
            raise StartupError(
                f"the {child.name} died {_MOST_DEATHS} times within {_DEATHS_WITHIN_S:.0f} s, giving up; "
                f"last words: {child.last_words()} (see {child.log})"
            )

    def _engine_leftovers(self) -> list[psutil.Process]:
        """All descendants but the API: what a dead engine started has come back to us, the subreaper."""
        return [process for process in processes.descendants() if process.pid != self._api.pid]

    async def _set_engine_state(self, store: Store, name: str, detail: str) -> None:
        """Futures up to `died_after` were accepted before this engine: the next one fails what is pending."""
        with store.read() as conn:
            last = queue.last_id(conn)
        value = {"state": name, "detail": detail, "since": time.time(), "died_after": last}
        await store.write(lambda conn: server_state.put(conn, "engine", value))

    async def _announce(self) -> None:
        """Poll /readyz; one line when it turns 200. StartupError when the engine says that it failed."""
        url, told = _url(self._settings.host, self._settings.port), ""
        async with httpx.AsyncClient(trust_env=False, timeout=5.0) as client:
            while (news := await _readiness(client, self._settings)) is not None:
                if news.get("state") == "failed":
                    raise StartupError(str(news.get("detail")))
                detail = str(news.get("detail", ""))
                if detail != told:
                    self._progress(detail)
                told = detail
                await asyncio.sleep(_READY_POLL_S)
        self._ready(url)

    async def _record_processes(self) -> None:
        """Keep the pid file true, for the next server if this one is killed, and collect dead orphans."""
        recorded: set[processes.Identity] = set()
        while True:
            processes.reap_orphans(known=(self._api.pid or 0, self._engine.pid or 0))
            running = processes.identities(processes.descendants())
            if running != recorded:
                processes.write_pid_file(self._places.pid_file, running)
                recorded = running
            await asyncio.sleep(_RECORD_S)

    async def _pass_on_warnings(self, store: Store) -> None:
        """The engine's standing warning, once each time that it changes."""
        told = await _warning(store)
        while True:
            await asyncio.sleep(_RECORD_S)
            with suppress(OperationalError):  # a database that fails briefly is asked again
                warning = await _warning(store)
                if warning is not None and warning != told:
                    self._warn(warning)
                told = warning

    async def _end_children(self) -> None:
        running = [child.process for child in (self._api, self._engine) if child.process and child.pid]
        for process in running:
            process.send_signal(signal.SIGTERM)
        ends = asyncio.gather(*(process.wait() for process in running))
        hurried = asyncio.create_task(self._hurry.wait())
        await asyncio.wait((ends, hurried), timeout=_STOP_S, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        processes.kill_descendants(0.0 if self._hurry.is_set() else _KILL_GRACE_S)
        await ends


async def _warning(store: Store) -> str | None:
    with store.read() as conn:
        return server_state.get(conn, server_state.WARNING)


async def _readiness(client: httpx.AsyncClient, settings: Settings) -> dict[str, object] | None:
    """What /readyz says; None when it is ready."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
    try:
        response = await client.get(f"{_url(host, settings.port)}/readyz")
    except httpx.TransportError:
        return {"detail": "starting the API"}
    if response.status_code == httpx.codes.OK:
        return None
    content = response.json()
    return content if isinstance(content, dict) else {}


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _ending(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
