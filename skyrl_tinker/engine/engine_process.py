"""Process of the engine, which owns the order of all requests and the state of all models.

`python -m skyrl_tinker.engine.engine_process SETTINGS_JSON`; exit code 0 after SIGTERM, 1 when it failed,
EX_TEMPFAIL (75) where Ray had too little time to start.
"""

import asyncio
import logging
import os
import secrets
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import uvloop

from skyrl_tinker import config
from skyrl_tinker.config import Settings
from skyrl_tinker.directories import LOG_BYTES, Directories
from skyrl_tinker.errors import RaySlowError, StartupError
from skyrl_tinker.redaction import log_to_stderr
from skyrl_tinker.store.cluster.notify_bell import bind_doorbell
from skyrl_tinker.store.cluster.server_lease import own_epoch
from skyrl_tinker.store.database.abstract_database import LeaseFence
from skyrl_tinker.store.store import Store
from skyrl_tinker.system import processes
from skyrl_tinker.system.process_lock import process_lock

if TYPE_CHECKING:
    from skyrl_tinker.engine.ray_cluster import RayCluster

_log = logging.getLogger(__name__)


def run(settings_file: Path) -> int:
    """Run until SIGTERM or a failure, and leave no process behind. Returns the exit code."""
    log_to_stderr()
    signal.signal(signal.SIGTERM, _exit)
    settings = config.read_back(settings_file)
    directories = Directories(settings)
    processes.become_subreaper()
    processes.raise_open_files_limit()
    if settings.ray_address is None:
        os.environ.update(_ray_environment(_ray_directory(directories)))
    code = 1
    try:
        directories.make()
        with process_lock(directories.engine_lock, "engine"):
            failure = _run(settings, directories)
    except RaySlowError as error:
        failure, code = str(error), os.EX_TEMPFAIL
    except StartupError as error:  # another engine runs here, or Ray or a directory cannot be
        failure = str(error)
    finally:
        processes.kill_descendants(1.0)
    if failure is not None:
        _log.error("ended: %s", failure)  # the last line of the log
    return 0 if failure is None else code


def _exit(signum: int, _: FrameType | None) -> None:
    """Exit on SIGTERM until the event loop handles it."""
    raise SystemExit(0)


def _ray_directory(directories: Directories) -> Path:
    return directories.bell_dir / "r"


def _ray_environment(directory: Path) -> dict[str, str]:
    """Return a local cluster's settings, for this process and its children; Ray reads them when imported."""
    return {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # bind to loopback, as Ray does there
        "RAY_AUTH_MODE": "token",  # other users of this host cannot run code as us
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_enable_metrics_collection": "0",  # without an agent nothing collects them
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # under `uv run` its workers would wait for an agent
        "RAY_ROTATION_MAX_BYTES": str(LOG_BYTES),
        "RAY_ROTATION_BACKUP_COUNT": "2",
        "RAY_prestart_worker_first_driver": "0",  # idle workers cost 40 MB each
        "RAY_enable_worker_prestart": "0",
        "RAY_worker_niceness": "0",  # trainers come before samplers, which give way by themselves
        "RAY_task_events_report_interval_ms": "0",  # off: gcs_server keeps 100,000, 3 kB each
        "TMPDIR": str(directory),  # leftovers of killed processes go at the next engine's start
    }


def _run(settings: Settings, directories: Directories) -> str | None:
    with processes.gc_paused():
        from skyrl_tinker.engine.ray_cluster import RayCluster  # not before its environment is set

    ray = RayCluster(settings, _ray_directory(directories))
    try:
        return uvloop.run(_main(settings, directories, ray))
    finally:
        ray.stop()


async def _main(settings: Settings, directories: Directories, ray: "RayCluster") -> str | None:
    with processes.gc_paused():
        from skyrl_tinker.engine.compose import Environment, make_metrics
        from skyrl_tinker.engine.engine import Engine
        from skyrl_tinker.engine.outbox import persistently
        from skyrl_tinker.engine.status import EngineStatus

    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    epoch = await persistently(asyncio.to_thread, own_epoch, settings.store_url, settings.root)
    fence = None if epoch is None else LeaseFence(epoch, _end_at_once)
    store = Store.open(settings.store_url, settings.root, fence)
    bell = bind_doorbell(settings.store_url, directories.home, "engine")
    try:
        await store.wait_until_there()
        status = EngineStatus(store, bell)
        metrics = make_metrics(settings, store)
        return await Engine(Environment(settings, directories, ray, store, bell, status, metrics)).run(stop)
    finally:
        await store.close()
        bell.close()  # after the last commits, which ring it


def _end_at_once(why: str) -> None:
    """End as if killed, once the server's lease is lost, without a reaction such as the removal of files.

    If the lease is still this server's, the next engine goes on from the state in the database.
    """
    _log.error("ended: %s", why)
    os._exit(1)


if __name__ == "__main__":
    processes.end_at_once(run(Path(sys.argv[1])))
