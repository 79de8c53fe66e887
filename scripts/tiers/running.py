"""Runs commands, some at a time, the first ones first."""

import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tiers.jobs import ROOT, Job

AT_ONCE = (os.cpu_count() or 1) + 1
"""Servers wait for part of their time."""


@dataclass(frozen=True)
class Ended:
    """`code`: of the exit. `core_s`: CPU time of all processes that were waited for."""

    job: Job
    code: int
    seconds: float
    core_s: float
    output: Path


def run_all(jobs: Sequence[Job], scratch: Path, deadline: float) -> Iterator[Ended]:
    """Yield the jobs as they end. What still runs at the deadline, of time.monotonic(), is ended."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        running = [pool.submit(run, job, scratch, deadline) for job in jobs]
        for done in as_completed(running):
            yield done.result()


def run(job: Job, scratch: Path, deadline: float) -> Ended:
    began = time.monotonic()
    output = scratch / f"{job.name.replace(' ', '-')}.out"
    with output.open("wb") as file:
        process = subprocess.Popen(
            job.command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        late = threading.Timer(max(0.0, deadline - began), _end, [process.pid])
        late.start()
        _, status, used = os.wait4(process.pid, 0)
        late.cancel()
    code = process.returncode = os.waitstatus_to_exitcode(status)
    return Ended(job, code, time.monotonic() - began, _core_s(used), output)


def _end(process: int) -> None:
    """Let pytest say where it stands, then end it with its servers."""
    os.kill(process, signal.SIGABRT)
    time.sleep(5)
    with suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)


def _core_s(used: resource.struct_rusage) -> float:
    return used.ru_utime + used.ru_stime
