"""Functions in processes of their own, forked: torch is imported already, and CUDA is started there only.

The caller must not have used CUDA, nor computed with torch: neither survives a fork.
"""

import multiprocessing
import os
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

from skyrl_tinker.system.processes import die_with_parent
from skyrl_tinker.training import distributed

TIMEOUT_S = 120.0
_FORK = multiprocessing.get_context("fork")
# NumPy's BLAS has threads from its import on, and looks after them in a fork.
warnings.filterwarnings("ignore", "This process .* is multi-threaded, use of fork", DeprecationWarning)


class ForkedError(Exception):
    """Error in another process, or its death."""


class Forked:
    """Process that sends what a generator yields. It ends, with those that it has started, on `close`."""

    def __init__(self, function: Callable[..., Iterator[Any]], *args: Any) -> None:
        self._pipe, there = _FORK.Pipe(duplex=False)
        self._process = _FORK.Process(target=_send, args=(there, function, args))
        self._process.start()
        there.close()

    def receive(self, timeout_s: float) -> Iterator[Any]:
        """Yield the next value, or nothing at the end. Raises ForkedError."""
        if not self._pipe.poll(timeout_s):
            raise ForkedError(f"no result after {timeout_s:.0f} s")
        try:
            value = self._pipe.recv()
        except EOFError:
            self._process.join()
            raise ForkedError(f"its process ended with exit code {self._process.exitcode}") from None
        if isinstance(value, ForkedError):
            raise value
        yield from value

    def close(self) -> None:
        self._pipe.close()
        self._process.kill()
        self._process.join()


def alone(function: Callable[..., Any], *args: Any) -> Any:
    """Return what a function returns in another process."""
    return _results([Forked(_once, function, *args)])[0]


def on_ranks(count: int, device: str, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Return what `function(ranks, *args)` returns on each of `count` ranks, which form a process group."""
    place = distributed.MeetingFile.make()
    try:
        arguments = [(place, rank, count, device, function, args) for rank in range(count)]
        return _results([Forked(_once, _on_rank, *each) for each in arguments])
    finally:
        place.remove()


def _results(processes: list[Forked]) -> list[Any]:
    with ExitStack() as stack:
        for process in processes:
            stack.callback(process.close)
        return [value for process in processes for value in process.receive(TIMEOUT_S)]


def _on_rank(
    place: Path, rank: int, count: int, device: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    if count > 1:  # as under Ray, which shows each rank its own GPU only; CUDA starts later
        shown = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
        os.environ["CUDA_VISIBLE_DEVICES"] = shown.split(",")[rank]
    ranks = distributed.join(place, rank, count, device, TIMEOUT_S)
    value = function(ranks, *args)
    dist.destroy_process_group()
    return value


def _once(function: Callable[..., Any], *args: Any) -> Iterator[Any]:
    yield function(*args)


def _send(pipe: Connection, function: Callable[..., Iterator[Any]], args: tuple[Any, ...]) -> None:
    """Send each value as a tuple, so that () can end them."""
    die_with_parent(signal.SIGKILL)
    try:
        for value in function(*args):
            pipe.send((value,))
        pipe.send(())
    except Exception as error:
        traceback.print_exc()
        pipe.send(ForkedError(f"{type(error).__name__}: {error}"))
