"""One server at a time works on a database, and what an earlier one commits late is refused."""

import asyncio
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import Connection, text
from sqlalchemy.exc import OperationalError

from skyrl_tinker.errors import LeaseLostError, StartupError
from skyrl_tinker.store import server_state
from skyrl_tinker.store.cluster.server_lease import HOLD_S, Lease, own_epoch
from skyrl_tinker.store.database.abstract_database import LeaseFence
from skyrl_tinker.store.store import Store
from tests.store.support.databases import on_postgresql, on_sqlite
from tests.support.postgres import Postgres
from tests.support.reads import reading
from tests.support.waiting import PATIENCE_S, until

NOTHING: Callable[[str], None] = lambda _: None  # noqa: E731


@pytest.fixture
def homes(tmp_path: Path) -> list[Path]:
    homes = [tmp_path / name for name in ("one", "other")]
    for home in homes:
        (home / "run").mkdir(parents=True)
    return homes


class Clock:
    """Time that passes only in `sleep`, where the other servers take the next step of their story."""

    def __init__(self) -> None:
        self.now = 0.0
        self.story: Iterator[None] = iter(())

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        next(self.story, None)

    def lease(self, url: str, home: Path) -> Lease:
        return Lease(url, home, lambda: self.now, self.sleep)


def keep_until(held: Lease, end_s: float, clock: Clock) -> Iterator[None]:
    while clock.now < end_s:
        held.keep()
        yield


@on_postgresql
def test_a_lease_that_is_kept_is_refused_to_another_home(url: str, homes: list[Path]) -> None:
    clock = Clock()
    first, second = Lease(url, homes[0]), clock.lease(url, homes[1])
    first.take(NOTHING)
    clock.story = keep_until(first, 5.0, clock)
    with pytest.raises(StartupError, match=f"another server works on this database: .*:{homes[0]}"):
        second.take(NOTHING)
    assert own_epoch(url, homes[0]) == first.epoch == 1
    with pytest.raises(LeaseLostError, match=str(homes[0])):
        own_epoch(url, homes[1])


@on_postgresql
def test_a_lease_that_is_let_go_is_taken_at_once(url: str, homes: list[Path]) -> None:
    clock = Clock()
    first, second = (clock.lease(url, home) for home in homes)
    first.take(NOTHING)
    first.close()
    second.take(NOTHING)
    assert (second.epoch, clock.now) == (2, 0.0)
    second.close()


@on_postgresql
def test_a_server_that_was_killed_takes_its_own_lease_at_once(url: str, homes: list[Path]) -> None:
    clock = Clock()
    first, again = (clock.lease(url, homes[0]) for _ in range(2))
    first.take(NOTHING)
    again.take(NOTHING)
    assert clock.now == 0.0
    with pytest.raises(LeaseLostError, match="another server has taken over"):
        first.keep()
    again.keep()


@on_postgresql
def test_a_standby_takes_over_once_the_holder_gives_no_sign_of_life(url: str, homes: list[Path]) -> None:
    clock = Clock()
    first, second = Lease(url, homes[0]), clock.lease(url, homes[1])
    first.take(NOTHING)
    last_beat_s = 2 * HOLD_S
    clock.story = keep_until(first, last_beat_s, clock)
    told: list[str] = []
    second.take(told.append, standby=True)
    assert second.epoch == 2
    assert last_beat_s + HOLD_S <= clock.now <= last_beat_s + HOLD_S + 2
    waits, takes = told
    assert str(homes[0]) in waits
    assert takes.endswith("the holder of the lease gave no sign of life for 20 s, taking over")
    with pytest.raises(LeaseLostError):
        first.keep()
    first.close()
    second.keep()


@on_postgresql
def test_a_holder_that_gives_a_sign_of_life_at_the_last_moment_keeps_its_lease(
    url: str, homes: list[Path]
) -> None:
    clock = Clock()
    first, second = Lease(url, homes[0]), clock.lease(url, homes[1])
    first.take(NOTHING)

    def wake_up(told: str) -> None:
        if told.endswith("taking over"):
            clock.story = keep_until(first, math.inf, clock)
            first.keep()

    with pytest.raises(StartupError, match=f"another server works on this database: .*:{homes[0]}"):
        second.take(wake_up)
    assert (first.epoch, second.epoch) == (1, None)


@on_postgresql
def test_of_two_that_saw_the_same_silence_one_takes_over(url: str, homes: list[Path]) -> None:
    clock = Clock()
    first, second = Lease(url, homes[0]), clock.lease(url, homes[1])
    third_home = homes[0].with_name("third")
    (third_home / "run").mkdir(parents=True)
    third = clock.lease(url, third_home)
    first.take(NOTHING)

    def overtake(told: str) -> None:
        if told.endswith("taking over"):
            third.take(NOTHING)
            clock.story = keep_until(third, math.inf, clock)

    with pytest.raises(StartupError, match=f"another server works on this database: .*:{third_home}"):
        second.take(overtake)
    assert (second.epoch, third.epoch) == (None, 2)


@on_postgresql
def test_a_database_that_was_away_costs_no_holder_its_lease(
    url: str, homes: list[Path], postgres: Postgres
) -> None:
    clock = Clock()
    first, second = Lease(url, homes[0]), clock.lease(url, homes[1])
    first.take(NOTHING)

    def story() -> Iterator[None]:
        yield from keep_until(first, 5.0, clock)
        postgres.stop()
        with pytest.raises(OperationalError):
            first.keep()
        while clock.now < 2 * HOLD_S:
            yield
        postgres.start()
        yield from keep_until(first, 4 * HOLD_S, clock)
        assert second.epoch is None
        first.close()

    clock.story = story()
    second.take(NOTHING, standby=True)
    assert second.epoch == 2
    assert clock.now >= 4 * HOLD_S


@on_postgresql
async def test_what_an_earlier_server_commits_late_is_refused_and_undone(
    url: str, homes: list[Path], tmp_path: Path
) -> None:
    first, second = (Lease(url, home) for home in homes)
    first.take(NOTHING)
    lost: list[str] = []
    assert first.epoch is not None
    late = Store.open(url, tmp_path, LeaseFence(first.epoch, lost.append))
    await late.write(lambda conn: server_state.put(conn, "k", 1))
    first.close()
    second.take(NOTHING)
    assert second.epoch is not None
    current = Store.open(url, tmp_path, LeaseFence(second.epoch))
    await current.write(lambda conn: server_state.put(conn, "k", 2))
    for _ in range(2):
        with pytest.raises(LeaseLostError):
            await late.write(lambda conn: server_state.put(conn, "k", 3))
    assert lost == ["another server has taken over the database"] * 2
    with reading(late) as conn:
        assert server_state.get(conn, "k") == 2
    for store in (late, current):
        await store.close()


@on_postgresql
async def test_who_waits_for_its_turn_while_another_takes_over_is_refused(
    url: str, store: Store, homes: list[Path], tmp_path: Path
) -> None:
    """Its transaction had begun before: what counts is what the database has when its turn comes."""
    first, second = (Lease(url, home) for home in homes)
    first.take(NOTHING)
    assert first.epoch is not None
    late = Store.open(url, tmp_path, LeaseFence(first.epoch))
    await late.write(lambda conn: server_state.put(conn, "k", 1))
    begun, go_on = threading.Event(), threading.Event()

    def take_over(conn: Connection) -> None:
        begun.set()
        go_on.wait(PATIENCE_S)
        server_state.put(conn, server_state.LEASE, {"epoch": 2, "holder": "another", "beats": 0})

    taking = asyncio.create_task(store.write(take_over))
    await asyncio.to_thread(begun.wait, PATIENCE_S)
    writing = asyncio.create_task(late.write(lambda conn: server_state.put(conn, "k", 3)))
    await until(lambda: queued_writers(store))
    go_on.set()
    await taking
    with pytest.raises(LeaseLostError):
        await writing
    second.close()
    await late.close()


def queued_writers(store: Store) -> int:
    with reading(store) as conn:
        return int(conn.scalar(text("SELECT count(*) FROM pg_locks WHERE NOT granted")) or 0)


@on_sqlite
def test_a_file_has_no_lease(url: str, homes: list[Path]) -> None:
    for home in homes:
        held = Lease(url, home)
        held.take(NOTHING)
        held.keep()
        held.close()
        assert own_epoch(url, home) is None
