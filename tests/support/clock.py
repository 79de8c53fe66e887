"""Refuses tests that wait for the clock. A test of the deterministic tier waits for a state, in `waiting`.

Free of it: what starts servers, and event loops on which time passes at once.
"""

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
FREE = {TESTS / "support" / "waiting.py", Path(__file__)}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    return (yield from _held_to_it(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    return (yield from _held_to_it(item))


def _held_to_it(item: pytest.Item) -> Iterator[None]:
    if item.get_closest_marker("servers"):
        yield
        return
    with noted_sleeps() as slept:
        yield
    if slept:
        pytest.fail(f"it waits for the clock: {'; '.join(slept)}", pytrace=False)


@contextmanager
def noted_sleeps() -> Iterator[list[str]]:
    """Note each sleep of real time that is called from a file of tests/, by place and seconds."""
    slept: list[str] = []

    def noting(sleep: Callable[..., Any]) -> Callable[..., Any]:
        def noted(delay: float, *args: Any) -> Any:
            caller = sys._getframe(1)
            if delay > 0 and _is_held_to_it(caller.f_code.co_filename) and not _is_on_virtual_time():
                slept.append(f"{caller.f_code.co_filename}:{caller.f_lineno} sleeps {delay} s")
            return sleep(delay, *args)

        return noted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "sleep", noting(time.sleep))
        patch.setattr(asyncio, "sleep", noting(asyncio.sleep))
        yield slept


def _is_held_to_it(file: str) -> bool:
    return Path(file).is_relative_to(TESTS) and Path(file) not in FREE


def _is_on_virtual_time() -> bool:
    try:
        return type(asyncio.get_running_loop()).__module__.startswith("tests.")
    except RuntimeError:
        return False
