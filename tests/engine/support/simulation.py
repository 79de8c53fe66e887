"""Event loop on which time passes only while no task can run, and then at once."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any


class _Selector(selectors.DefaultSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "all tasks wait indefinitely"
            self.now += timeout
        return ready


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def now() -> float:
    """0 before it begins."""
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return 0.0


def simulate(story: Coroutine[Any, Any, None]) -> None:
    """Hours take milliseconds; AssertionError when all tasks wait indefinitely."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        runner.run(story)


def simulated(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Make a test whose time passes at once."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        simulate(test(*args, **kwargs))

    return run
