"""`skyrl-tinker api`: an API process on another host than the engine's, on the same PostgreSQL database."""

import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy.exc import OperationalError, ProgrammingError

from skyrl_tinker.config import Settings
from skyrl_tinker.directories import Directories
from skyrl_tinker.errors import StartupError
from skyrl_tinker.server import preflight, shared_settings
from skyrl_tinker.server.addresses import client_url
from skyrl_tinker.server.shared_settings import ServerSettings
from skyrl_tinker.store import server_state
from skyrl_tinker.store.cluster import signing_secrets
from skyrl_tinker.store.database.opening import file_of, open_database
from skyrl_tinker.system.atomic_directory import write_file
from skyrl_tinker.system.process_lock import process_lock

if TYPE_CHECKING:
    from skyrl_tinker.store.database.abstract_database import Database

READY = "skyrl-tinker API listens: "
"""Beginning of the line that is reported; the URL follows."""
_RETRY_S = 1.0
Report = Callable[[str], None]


def serve_api(given: Settings, ready: Report, progress: Report) -> None:
    """Serve until SIGTERM or Ctrl-C, once there is a database on which a server has started.

    Raises StartupError when it cannot start.
    """
    if file_of(given.store_url) is not None:
        raise StartupError(
            "api: found a database that is a file, which serves one host; expected --database-url "
            "postgresql+psycopg://… of the server"
        )
    preflight.check_tls(given)
    directories = Directories(given)
    missing = given.checkpoints is not None and not given.checkpoint_root.is_dir()
    directories.make()
    with process_lock(directories.server_lock, "server or API process"):
        server, fingerprint = _await_server(given, progress)
        signing_secrets.require_copy(given.root, fingerprint)
        settings = server.joined(given)
        if settings.engine_listen is None:
            raise StartupError(
                "the server was started without engine_listen: set it there to HOST:PORT, where this host "
                "reaches its engine"
            )
        preflight.check_host(settings)
        _warn_of_missing(settings, progress, missing=missing)
        # Of storage each host has a cache below its own home.
        _listen(settings, settings.root if settings.checkpoint_url else server.home, ready)


def _await_server(given: Settings, progress: Report) -> tuple[ServerSettings, str | None]:
    """Wait for the settings of the server, and the fingerprint of its secrets."""
    told = ""
    with closing(open_database(given.store_url)) as database:
        while True:
            try:
                found = _read(database)
                why = "no server has started on the database yet"
            except OperationalError as error:
                found, why = None, f"the database does not answer: {error.orig}"
            if found is not None:
                return found
            if why != told:
                progress(f"{why}; waiting")
            told = why
            time.sleep(_RETRY_S)


def _read(database: "Database") -> tuple[ServerSettings, str | None] | None:
    with closing(database.connect()) as conn:
        try:
            with database.reading(conn):
                server = shared_settings.read(conn)
                return None if server is None else (server, server_state.get(conn, server_state.SECRETS))
        except ProgrammingError:  # there are no tables
            return None


def _warn_of_missing(settings: Settings, progress: Report, *, missing: bool) -> None:
    """`missing`: the given home was not there before it was made."""
    root = settings.checkpoint_root
    if settings.checkpoint_url is None and (missing or not root.is_dir()):
        progress(
            f"{root} is not here: downloads and copies of checkpoints need it, so let the hosts share it "
            "(--checkpoints); all else works"
        )


def _listen(settings: Settings, files_home: Path, ready: Report) -> None:
    import uvloop

    from skyrl_tinker.api import api_process

    with preflight.listen(settings.host, settings.port) as listener:
        settings = settings.model_copy(update={"port": listener.getsockname()[1], "api_processes": 1})
        write_file(Directories(settings).settings_file, settings.model_dump_json())
        ready(READY + client_url(settings))
        api_process.prepare()
        uvloop.run(api_process.run(settings, listener, files_home))
