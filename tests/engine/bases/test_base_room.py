"""GPUs of base models on demand: who gets them, who waits, and who is to leave."""

import asyncio

import pytest

from skyrl_tinker.domain.units import GB
from skyrl_tinker.engine.bases import base_room
from skyrl_tinker.engine.bases.base_room import BaseRoom, in_memory
from tests.support.waiting import until


class Told(list[str]):
    async def hear(self, why: str) -> None:
        self.append(why)


async def test_those_that_fit_beside_each_other_do_not_wait_and_on_a_cpu_all_do() -> None:
    told = Told()
    for room in (BaseRoom(3, {"a": 1, "b": 2}), BaseRoom(0, {"a": 0, "b": 0}), BaseRoom()):
        for name in ("a", "b"):
            await room.enter(name, lambda: 0.0, told.hear, lambda: True)
        assert (told, room.wants("a"), room.wants("b")) == ([], False, False)


async def test_it_may_be_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_room, "ROOM_CHECK_S", 0.01)
    room, told = BaseRoom(3 * GB, {"a": 2 * GB, "b": 1_700_000_000}, in_memory), Told()
    await room.enter("a", lambda: 0.0, told.hear, lambda: True)
    entering = asyncio.create_task(room.enter("b", lambda: 0.0, told.hear, lambda: True))
    await until(lambda: room.wants("a"))
    assert told == ["it waits for 1.7 GB of memory of a"]
    room.leave("a")
    await entering


async def test_the_one_longest_idle_is_to_leave_then_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_room, "ROOM_CHECK_S", 0.01)
    idle, told = {"a": 1.0, "b": 2.0}, Told()
    room = BaseRoom(2, {"a": 1, "b": 1, "c": 2, "d": 0})
    for name in ("a", "b", "d"):
        await room.enter(name, lambda name=name: idle.get(name, 0.0), told.hear, lambda: True)  # type: ignore[misc]
    entering = asyncio.create_task(room.enter("c", lambda: 0.0, told.hear, lambda: True))
    behind = Told()
    later = asyncio.create_task(room.enter("a", lambda: 0.0, behind.hear, lambda: True))
    await until(lambda: room.wants("b") and behind)
    assert (told[-1], behind) == ("it waits for 2 GPUs of a, b", ["it waits behind c, for which room lacks"])
    idle["a"] = 3.0
    await until(lambda: room.wants("a"))
    room.leave("a")
    await until(lambda: room.wants("b") and told[-1] == "it waits for 2 GPUs of b")
    room.leave("b")
    await entering
    await until(lambda: room.wants("c"))
    assert behind[-1] == "it waits for 1 GPU of c"
    room.leave("c")
    await later
    assert not any(map(room.wants, "abcd"))


@pytest.mark.parametrize("given_up", [True, False])
async def test_one_that_is_not_waited_for_any_more_may_stay(
    monkeypatch: pytest.MonkeyPatch, given_up: bool
) -> None:
    """As the request that needed the other was cancelled, or the server stops."""
    monkeypatch.setattr(base_room, "ROOM_CHECK_S", 0.01)
    needed = [True]
    room, told = BaseRoom(1, {"a": 1, "b": 1}), Told()
    await room.enter("a", lambda: 0.0, told.hear, lambda: True)
    entering = asyncio.create_task(room.enter("b", lambda: 0.0, told.hear, lambda: bool(needed)))
    await until(lambda: room.wants("a"))
    if given_up:
        needed.clear()
    else:
        entering.cancel()
    await asyncio.wait([entering])
    assert not room.wants("a")
    assert entering.cancelled() or entering.result() is False
