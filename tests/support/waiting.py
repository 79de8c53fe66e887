"""The one way in which tests wait: for a state. Its limits guard against hanging only."""

import asyncio
import inspect
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar, overload

import pytest

T = TypeVar("T")
PATIENCE_S = 480.0
"""Longer than anything takes on a machine that is busy with other work."""
IDLE, MOST_S = 4, 0.25
"""Times the CPU time of a look until the next one: waiting leaves the machine to what it waits for."""


@overload
async def until(
    look: Callable[[], Awaitable[T]], wanted: Callable[[T], object] = ..., within_s: float = ...
) -> T: ...
@overload
async def until(look: Callable[[], T], wanted: Callable[[T], object] = ..., within_s: float = ...) -> T: ...
async def until(
    look: Callable[[], Any], wanted: Callable[[Any], object] = bool, within_s: float = PATIENCE_S
) -> Any:
    """Return the first look that is wanted. Raises TimeoutError with the last one."""
    deadline = time.monotonic() + within_s
    while True:
        began = time.thread_time()
        found = look()
        seen = await found if inspect.isawaitable(found) else found
        if wanted(seen):
            return seen
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {within_s:.0f} s; last seen: {seen!r}")
        await asyncio.sleep(_pause(0.005, began))


def wait_until(condition: Callable[[], object], within_s: float = PATIENCE_S, every_s: float = 0.05) -> None:
    """Wait for the condition to hold. Raises TimeoutError."""
    deadline = time.monotonic() + within_s
    began = time.thread_time()
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{condition.__qualname__}: not within {within_s:.0f} s")
        time.sleep(_pause(every_s, began))
        began = time.thread_time()


@asynccontextmanager
async def holding(gate: threading.Event, tasks: "Sequence[asyncio.Task[Any]]" = ()) -> AsyncIterator[None]:
    """Context with a time limit, in which threads wait for `gate`; it opens behind it, and tasks end."""
    try:
        await asyncio.sleep(0)  # until the tasks have begun
        async with asyncio.timeout(PATIENCE_S):
            yield
    finally:
        gate.set()
    await asyncio.gather(*tasks)


def hold(
    patch: pytest.MonkeyPatch,
    of: Any,
    name: str,
    gate: threading.Event,
    *,
    only: Callable[..., object] = lambda *_: True,
) -> list[Any]:
    """Have calls of a function wait for `gate`, `only` those for whose arguments this holds.

    Returns a list that gets the arguments of each call, before it waits.
    """
    work, begun = getattr(of, name), list[Any]()

    def wait_first(*arguments: Any, **named: Any) -> Any:
        begun.append(arguments)
        if only(*arguments):
            gate.wait()
        return work(*arguments, **named)

    patch.setattr(of, name, wait_first)
    return begun


async def end(task: "asyncio.Task[Any]") -> None:
    """Cancel a task and wait for its end. Raises the error that it ended by before."""
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def _pause(least_s: float, began: float) -> float:
    return max(least_s, min(MOST_S, IDLE * (time.thread_time() - began)))
