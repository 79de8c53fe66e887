"""`skyrl-tinker doctor`: obstacles to a server on this machine, one line per check."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from skyrl_tinker.config import Settings
from skyrl_tinker.directories import Directories
from skyrl_tinker.errors import StartupError
from skyrl_tinker.server import machine_checks
from skyrl_tinker.system.process_lock import process_lock

_ON_GPUS = "GPUs", "plan"
"""Checks for which the driver has to answer."""
LIMIT_S = 18.0
"""Time from the start of the process to the last finding, where imports take less."""
_LEAST_S = 2.0  # that checks have where imports take longer
T = TypeVar("T")


def report(settings: Settings, age_s: float = 0.0) -> bool:
    """Print every check of a server with these settings; True when all passed.

    `age_s`: how long the process runs already.
    """
    until = time.monotonic() + max(_LEAST_S, LIMIT_S - age_s)
    running = _server(settings, (time.monotonic() + until) / 2)
    driver = _begin(machine_checks.driver_version) if settings.device == "cuda" else None
    elsewhere = settings.checkpoint_url or settings.snapshot_url
    checks: dict[str, Callable[[], str]] = {
        "settings": lambda: machine_checks.check_settings(settings),
        "python": machine_checks.check_python,
        "processor": machine_checks.check_processor,
        "packages": lambda: machine_checks.check_packages(settings),
        "libraries": lambda: machine_checks.check_libraries(settings.device),
        **({"driver": partial(machine_checks.check_driver, driver)} if driver else {}),
        **({"GPUs": lambda: machine_checks.check_gpus(filled=running is not None)} if driver else {}),
        "base model": lambda: machine_checks.check_base_model(settings),
        **({"plan": lambda: machine_checks.check_plan(settings)} if driver and running is None else {}),
        **({"memory": lambda: machine_checks.check_memory(settings)} if running is None else {}),
        **({"/dev/shm": machine_checks.check_shared_memory} if running is None else {}),
        "home": lambda: machine_checks.check_home(settings.root),
        "disk": lambda: machine_checks.check_disk(settings),
        "database": lambda: machine_checks.check_database(settings),
        "host": lambda: machine_checks.check_host(settings),
        **({"storage": lambda: machine_checks.check_storage(settings)} if elsewhere else {}),
        "open files": machine_checks.check_open_files,
        **({"port": lambda: machine_checks.check_port(settings)} if running is None else {"server": running}),
    }
    begun = {name: _begin(check, driver if name in _ON_GPUS else None) for name, check in checks.items()}
    passed = [
        _tell(name, finding, until)
        for name, finding in begun.items()
        if name not in _ON_GPUS or _answered(driver)  # else the driver's finding has said it all
    ]
    return all(passed)


def _answered(driver: "Future[str] | None") -> bool:
    return driver is not None and driver.done() and driver.exception() is None


def _server(settings: Settings, until: float) -> Callable[[], str] | None:
    """Return the check of the server that runs on this home, None without one; it fails if that is not known.

    Beside a server, known or not, nothing is checked that it may take: memory, GPUs and the port.
    """
    try:
        found = _begin(lambda: _running(settings)).result(max(0.0, until - time.monotonic()))
    except OSError as error:  # TimeoutError is one
        why = str(error) or "its lock did not answer in time"
        return lambda: machine_checks.need(False, f"not known whether one runs on {settings.home}: {why}")
    return None if found is None else lambda: str(found)


def _running(settings: Settings) -> str | None:
    """Return a finding on the server that runs on this home, None without one."""
    lock = Directories(settings).server_lock
    try:
        if lock.exists():
            with process_lock(lock, "server"):
                pass
    except StartupError:
        return f"a server runs here already (pid {lock.read_text()}); skyrl-tinker status shows it"
    return None


def _begin(check: Callable[[], T], before: "Future[str] | None" = None) -> "Future[T]":
    """Run a check, unless the one before fails, in a thread that the process does not wait for at its end."""
    finding: Future[T] = Future()

    def run() -> None:
        try:
            if before is not None:
                before.result()
            finding.set_result(check())
        except (StartupError, OSError) as error:
            finding.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return finding


def _tell(name: str, finding: "Future[str]", until: float) -> bool:
    try:
        print(f"ok    {name:<11} {finding.result(max(0.0, until - time.monotonic()))}", flush=True)
    except TimeoutError:
        late = f"not known after {LIMIT_S:g} s: something that it asks does not answer, or is slow"
        print(f"FAIL  {name:<11} {late}")
        return False
    except (StartupError, OSError) as error:
        print(f"FAIL  {name:<11} {error}")
        return False
    return True
