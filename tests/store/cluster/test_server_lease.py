"""One server at a time works on a database, and what an earlier one commits late is refused."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy.exc import OperationalError

from skyrl_tinker.errors import LeaseLostError, StartupError
from skyrl_tinker.store import server_state
from skyrl_tinker.store.cluster import server_lease
from skyrl_tinker.store.cluster.server_lease import Lease, own_epoch
from skyrl_tinker.store.database.abstract_database import LeaseFence
from skyrl_tinker.store.store import Store
from tests.store.support.databases import on_postgresql, on_sqlite
from tests.support.postgres import Postgres

NOTHING: Callable[[str], None] = lambda _: None  # noqa: E731


@pytest.fixture
def homes(tmp_path: Path) -> list[Path]:
    homes = [tmp_path / name for name in ("one", "other")]
    for home in homes:
        (home / "run").mkdir(parents=True)
    return homes


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_lease, "HOLD_S", 1.0)
    monkeypatch.setattr(server_lease, "_LOOK_S", 0.1)


@pytest.fixture
def beating() -> Iterator[Callable[[Lease], threading.Event]]:
    """Have a lease kept in a thread, until the event returned is set."""
    ends: list[tuple[threading.Event, threading.Thread]] = []

    def beat(held: Lease) -> threading.Event:
        end = threading.Event()

        def run() -> None:
            while not end.wait(0.2):
                held.keep()

        ends.append((end, threading.Thread(target=run)))
        ends[-1][1].start()
        return end

    yield beat
    for end, thread in ends:
        end.set()
        thread.join()


@on_postgresql
def test_a_lease_that_is_kept_is_refused_to_another_home(
    url: str, homes: list[Path], short: None, beating: Callable[[Lease], threading.Event]
) -> None:
    first, second = (Lease(url, home) for home in homes)
    first.take(NOTHING)
    beating(first)
    with pytest.raises(StartupError, match=f"another server works on this database: .*:{homes[0]}"):
        second.take(NOTHING)
    assert own_epoch(url, homes[0]) == first.epoch == 1
    with pytest.raises(LeaseLostError, match=str(homes[0])):
        own_epoch(url, homes[1])


@on_postgresql
def test_a_lease_that_is_let_go_is_taken_at_once(url: str, homes: list[Path]) -> None:
    first, second = (Lease(url, home) for home in homes)
    first.take(NOTHING)
    first.close()
    started = time.monotonic()
    second.take(NOTHING)
    assert (second.epoch, time.monotonic() - started < server_lease.HOLD_S / 2) == (2, True)
    second.close()


@on_postgresql
def test_a_server_that_was_killed_takes_its_own_lease_at_once(url: str, homes: list[Path]) -> None:
    first, again = Lease(url, homes[0]), Lease(url, homes[0])
    first.take(NOTHING)
    started = time.monotonic()
    again.take(NOTHING)
    assert time.monotonic() - started < server_lease.HOLD_S / 2
    with pytest.raises(LeaseLostError, match="another server has taken over"):
        first.keep()
    again.keep()


@on_postgresql
def test_a_standby_takes_over_once_the_holder_gives_no_sign_of_life(
    url: str, homes: list[Path], short: None, beating: Callable[[Lease], threading.Event]
) -> None:
    first, second = (Lease(url, home) for home in homes)
    first.take(NOTHING)
    end = beating(first)
    told: list[str] = []
    waiting = threading.Thread(target=lambda: second.take(told.append, standby=True))
    waiting.start()
    time.sleep(2.0)
    assert second.epoch is None, "it was kept for longer than a lease lasts"
    end.set()
    waiting.join(5)
    assert second.epoch == 2
    waits, takes = told
    assert str(homes[0]) in waits
    assert takes.endswith("the holder of the lease gave no sign of life for 1 s, taking over")
    with pytest.raises(LeaseLostError):
        first.keep()
    first.close()
    second.keep()


@on_postgresql
def test_a_database_that_was_away_costs_no_holder_its_lease(
    url: str, homes: list[Path], short: None, postgres: Postgres
) -> None:
    first, second = (Lease(url, home) for home in homes)
    first.take(NOTHING)
    waiting = threading.Thread(target=lambda: second.take(NOTHING, standby=True), daemon=True)
    waiting.start()
    time.sleep(0.5)
    postgres.stop()
    with pytest.raises(OperationalError):
        first.keep()
    time.sleep(1.5)
    postgres.start()
    for _ in range(10):
        time.sleep(0.2)
        first.keep()
    assert second.epoch is None
    first.close()
    waiting.join(5)
    assert second.epoch == 2


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
    with late.read() as conn:
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

    def take_over(conn: object) -> None:
        begun.set()
        go_on.wait(10)
        server_state.put(conn, server_state.LEASE, {"epoch": 2, "holder": "another", "beats": 0})

    taking = asyncio.create_task(store.write(take_over))
    await asyncio.to_thread(begun.wait, 10)
    writing = asyncio.create_task(late.write(lambda conn: server_state.put(conn, "k", 3)))
    await asyncio.sleep(0.5)
    go_on.set()
    await taking
    with pytest.raises(LeaseLostError):
        await writing
    second.close()
    await late.close()


@on_sqlite
def test_a_file_has_no_lease(url: str, homes: list[Path]) -> None:
    for home in homes:
        held = Lease(url, home)
        held.take(NOTHING)
        held.keep()
        held.close()
        assert own_epoch(url, home) is None
