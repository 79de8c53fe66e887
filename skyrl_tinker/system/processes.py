"""Ends of processes that we started: adopted orphans, children, leftovers by pid. Linux only."""

import ctypes
import gc
import json
import logging
import os
import platform
import resource
import signal
import struct
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

import psutil

from skyrl_tinker.errors import StartupError
from skyrl_tinker.system.atomic_directory import write_file

T = TypeVar("T")
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.05
YOUNG_OBJECTS = 50_000
"""New objects after which they are collected: 512 samples in progress have 20,000 to 40,000."""
_SAME_START_S = 1.0  # create times are rounded and move with the wall clock
_ONE_HEAP = {-8: 1, -3: 1 << 20, -1: 1 << 20}  # M_ARENA_MAX, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
_earlier: set[psutil.Process] = set()
_SCHED_SETATTR, _SCHED_GETATTR = (314, 315) if platform.machine() == "x86_64" else (274, 275)
_SCHED_ATTR, _SLICE = struct.Struct("=IIQiIQQQ"), 5  # sched_setattr(2); the place of sched_runtime
_LIBC = ctypes.CDLL(None, use_errno=True)  # loaded here: a preexec_fn must not import


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def become_subreaper() -> None:
    """Make orphaned descendants our children instead of init's, so that we can find and reap them.

    Those that there are now, of a shell whose place we took, are nothing of ours.
    """
    _earlier.update(psutil.Process().children(recursive=True))
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(signum: int = signal.SIGTERM) -> None:
    """Let the kernel send `signum` to this process when the *thread* that started it ends.

    Works as a preexec_fn (`preexec_fn=die_with_parent`) or at the start of a child's main. Start such
    children from the main thread, or they die with a worker thread.
    """
    _prctl(_PR_SET_PDEATHSIG, signum)


def compute_in_slices(seconds: float) -> bool:
    """Let this process compute for so long before another one has its turn, unless that one just woke up.

    Threads and children that it starts from now on inherit it. A waking process whose slice is shorter need
    not wait for the end of a longer one: the share of each stays, by niceness. Works as part of a preexec_fn.
    Returns whether the kernel does so: Linux before 6.12 ignores it, and a sandbox may refuse it.
    """
    policy, niceness = os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)
    attributes = _SCHED_ATTR.pack(_SCHED_ATTR.size, policy, 0, niceness, 0, round(seconds * 1e9), 0, 0)
    _LIBC.syscall(_SCHED_SETATTR, 0, attributes, 0)
    return slice_s() == seconds


def slice_s(pid: int = 0) -> float:
    """Return the slice of a process, 0: of this thread. It is 0.0 where the kernel has one for all."""
    attributes = ctypes.create_string_buffer(_SCHED_ATTR.size)
    _LIBC.syscall(_SCHED_GETATTR, pid, attributes, _SCHED_ATTR.size, 0)
    return float(_SCHED_ATTR.unpack(attributes.raw)[_SLICE]) / 1e9


def raise_open_files_limit() -> None:
    """Raise RLIMIT_NOFILE to its hard limit: hundreds of long polls and sampler connections need it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def return_freed_memory() -> None:
    """Have glibc give memory back to the system; call it before threads are started (mallopt(3)).

    By itself it keeps a heap for each thread, and, once large blocks were freed, others of their size in it.
    """
    if hasattr(_LIBC, "mallopt"):
        for parameter, value in _ONE_HEAP.items():
            _LIBC.mallopt(parameter, value)


def run_nicely(work: Callable[[], T], niceness: int) -> T:
    """Return `work()`, run in a thread of so much more niceness, which the threads that it starts inherit.

    Linux has one for each thread (sched(7)), and without a privilege none goes down again: the threads that
    there are keep their own.
    """
    if not niceness:
        return work()
    with ThreadPoolExecutor(1, "nice", os.nice, (niceness,)) as thread:
        return thread.submit(work).result()


def end_at_once(code: int) -> NoReturn:
    """End this process, without waiting for its threads, of which one may encrypt an export for minutes.

    Their work must be such that it can end anywhere, as it does when the process is killed.
    """
    logging.shutdown()
    os._exit(code)


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause garbage collections while lasting objects are loaded: imports of torch take a fifth less."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def freeze_gc() -> None:
    """Exempt all objects from garbage collection; call it once imports, schemas and statements are loaded.

    The collector would traverse them again and again, which took up to 40 % of the time of a sample
    (https://docs.python.org/3/library/gc.html#gc.freeze).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 20, 20)


def listens(pid: int, port: int) -> bool:
    """Return whether the process itself has a listening TCP socket of that port."""
    try:
        sockets = psutil.Process(pid).net_connections("tcp")
    except psutil.Error:
        return False
    return any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in sockets)


def descendants() -> list[psutil.Process]:
    """Return all descendants, zombies included, except trees from before `become_subreaper`."""
    spared = {each for earlier in _earlier for each in (earlier, *_children(earlier))}
    return [each for each in psutil.Process().children(recursive=True) if each not in spared]


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def list_stopped() -> list[psutil.Process]:
    """Return the descendants that stand still after SIGSTOP; those under a debugger are not among them."""
    return [process for process in descendants() if _status(process) == psutil.STATUS_STOPPED]


def reap_orphans(known: Collection[int] = ()) -> None:
    """Reap dead children except `known`, whose owners wait for them."""
    for child in psutil.Process().children():
        if child.pid not in known and _is_zombie(child):
            _reap(child.pid)


def kill_descendants(grace_s: float) -> list[int]:
    """SIGTERM to every descendant, SIGKILL to those left after `grace_s` seconds; reaps them all.

    Returns the pids that needed SIGKILL. Call it last: it takes exit codes away from their owners.
    """
    _end(descendants, signal.SIGTERM, grace_s)
    return _end(descendants, signal.SIGKILL, 5.0)


def end_processes(processes: Collection[psutil.Process], grace_s: float) -> None:
    """Send SIGTERM, then SIGKILL after `grace_s` seconds, to given processes, whatever started them."""

    def alive() -> list[psutil.Process]:
        return [process for process in processes if process.is_running()]

    _end(alive, signal.SIGTERM, grace_s)
    _end(alive, signal.SIGKILL, 5.0)


def _end(find: Callable[[], list[psutil.Process]], signum: int, within_s: float) -> list[int]:
    """Signal each process that `find` returns once, until it returns none or `within_s` has passed."""
    signalled: list[int] = []
    deadline = time.monotonic() + within_s
    while left := _alive(find()):
        fresh = [process for process in left if process.pid not in signalled]
        _signal(fresh, signum)
        signalled += [process.pid for process in fresh]
        if time.monotonic() >= deadline:
            break
        time.sleep(_POLL_S)
    return signalled


def _alive(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    alive = []
    for process in processes:
        if _is_zombie(process):
            _reap(process.pid)
        else:
            alive.append(process)
    return alive


def _signal(processes: Iterable[psutil.Process], signum: int) -> None:
    for process in processes:
        try:
            process.send_signal(signum)
        except psutil.NoSuchProcess:
            continue  # it has ended


def _is_zombie(process: psutil.Process) -> bool:
    return _status(process) == psutil.STATUS_ZOMBIE


def _status(process: psutil.Process) -> str:
    """Return its status; one that is gone has ended as a zombie has."""
    try:
        return process.status()
    except psutil.NoSuchProcess:
        return psutil.STATUS_ZOMBIE


def _reap(pid: int) -> None:
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return  # not our child: its own parent reaps it


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of a process that stays unique when its pid is reused."""

    pid: int
    created: float  # seconds since the epoch

    def find(self) -> psutil.Process | None:
        """Return the process if it still runs."""
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.created) < _SAME_START_S
        except psutil.NoSuchProcess:
            return None
        return process if same and not _is_zombie(process) else None


def identities(processes: Iterable[psutil.Process]) -> set[Identity]:
    result = set()
    for process in processes:
        try:
            result.add(Identity(process.pid, process.create_time()))
        except psutil.NoSuchProcess:
            continue  # it ended between the listing and now
    return result


def write_pid_file(path: Path, running: Iterable[Identity]) -> None:
    rows = sorted([identity.pid, identity.created] for identity in running)
    write_file(path, json.dumps(rows))


def read_pid_file(path: Path) -> list[Identity]:
    """Read the identities of a pid file; empty if it is missing. StartupError if it is damaged."""
    if not path.exists():
        return []
    try:
        return [Identity(int(pid), float(created)) for pid, created in json.loads(path.read_text())]
    except (ValueError, TypeError) as error:
        raise StartupError(
            f"{path} is damaged ({error}): end the processes that an earlier server has left, delete that "
            "file, and start again"
        ) from error


def end_leftovers(path: Path, grace_s: float) -> int:
    """End the processes in a killed predecessor's pid file; return their number."""
    left = [process for identity in read_pid_file(path) if (process := identity.find())]
    end_processes(left, grace_s)
    path.unlink(missing_ok=True)
    return len(left)
