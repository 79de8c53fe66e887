"""The one way in which tests wait: for a state. A limit guards against hanging only; no outcome depends on it."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar, cast

T = TypeVar("T")
PATIENCE_S = 240.0
"""Longer than anything takes on a machine that is busy with other work."""


async def until(
    look: Callable[[], T | Awaitable[T]], wanted: Callable[[T], object] = bool, within_s: float = PATIENCE_S
) -> T:
    """Return the first look that is wanted. Raises TimeoutError with the last one."""
    deadline = time.monotonic() + within_s
    while True:
        found = look()
        seen = cast(T, await found if inspect.isawaitable(found) else found)
        if wanted(seen):
            return seen
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {within_s:.0f} s; last seen: {seen!r}")
        await asyncio.sleep(0.005)


def wait_until(condition: Callable[[], object], within_s: float = PATIENCE_S, every_s: float = 0.05) -> bool:
    """Tell whether the condition came about in time."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(every_s)
    return True
