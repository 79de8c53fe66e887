"""Turns: of each key one piece of work at a time, or so many, which goes on where its caller gives up."""

import asyncio
from functools import partial

import pytest

from skyrl_tinker.system.turns import Turns


class Works:
    """Pieces of work in the order in which they began, each until `go_on` is set."""

    def __init__(self, at_once: int = 1) -> None:
        self.turns = Turns(at_once)
        self.begun: list[str] = []
        self.go_on = asyncio.Event()

    def ask(self, key: str | None, name: str) -> "asyncio.Task[str]":
        return asyncio.create_task(self.turns.run(key, partial(self._work, name)))

    async def _work(self, name: str) -> str:
        self.begun.append(name)
        await self.go_on.wait()
        return name


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_of_each_key_one_runs_at_a_time_in_order_of_arrival() -> None:
    works = Works()
    asked = [works.ask(key, name) for key, name in (("a", "a1"), ("a", "a2"), (None, "n1"), ("a", "a3"))]
    await settled()
    assert works.begun == ["a1", "n1"]
    works.go_on.set()
    assert await asyncio.gather(*asked) == ["a1", "a2", "n1", "a3"]
    assert works.begun == ["a1", "n1", "a2", "a3"]
    await settled()
    assert not works.turns._locks, "nothing is kept of a key that nobody uses"


async def test_of_each_key_as_many_run_as_may_at_once() -> None:
    works = Works(at_once=2)
    asked = [works.ask(key, name) for key, name in (("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1"))]
    await settled()
    assert works.begun == ["a1", "a2", "b1"]
    works.go_on.set()
    assert await asyncio.gather(*asked) == ["a1", "a2", "a3", "b1"]


async def test_it_goes_on_without_its_caller_but_does_not_begin_without_one() -> None:
    works = Works()
    left, gone, last = (works.ask("a", name) for name in ("left", "gone", "last"))
    await settled()
    for each in (left, gone):
        each.cancel()
    await settled()
    assert works.begun == ["left"]
    works.go_on.set()
    assert await last == "last"
    assert works.begun == ["left", "last"]


async def test_one_that_fails_ends_its_turn() -> None:
    async def fail() -> None:
        raise ValueError("it failed")

    turns = Turns()
    for _ in range(2):
        with pytest.raises(ValueError, match="it failed"):
            await turns.run("a", fail)
