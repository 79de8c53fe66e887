"""Reads: few connections however many ask, and a loop that goes on while the database does not answer."""

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
from sqlalchemy import Connection, text

from skyrl_tinker.domain.ids import ALL_OWNERS, OwnerId
from skyrl_tinker.store import server_state
from skyrl_tinker.store import store as stores
from skyrl_tinker.store.store import REPORT_THREADS, THREADS, Store
from tests.store.support.databases import on_postgresql, on_sqlite
from tests.store.support.rows import new_session
from tests.support.waiting import PATIENCE_S, holding, until

BACKENDS = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"


def backends(conn: Connection) -> list[int]:
    """Processes of the server that serve other connections to this database."""
    return list(conn.scalars(text(BACKENDS)))


@contextmanager
def stopped(processes: list[int]) -> Iterator[None]:
    for process in processes:
        os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            os.kill(process, signal.SIGCONT)


@on_postgresql
async def test_more_reads_than_the_server_has_connections_take_turns(store: Store) -> None:
    limit = await store.read(lambda conn: int(conn.scalar(text("SHOW max_connections")) or 0))
    many = range(limit + 30)
    found = await asyncio.gather(
        *(store.fetch(backends) for _ in many), *(store.read(backends) for _ in many)
    )
    assert max(map(len, found)) < 2 * THREADS
    await new_session(store)
    assert len(await store.read(backends)) <= 2 * THREADS  # the writer's instead of its own


@on_postgresql
async def test_the_loop_goes_on_while_the_database_stands_still(store: Store) -> None:
    await asyncio.gather(*(store.read(backends) for _ in range(50)), store.fetch(backends))
    own = [await store.read(lambda conn: conn.scalar(text("SELECT pg_backend_pid()"))) for _ in range(8)]
    with stopped([*await store.fetch(backends), *{int(pid) for pid in own if pid}]):
        read = asyncio.create_task(store.read(lambda conn: server_state.get(conn, "k")))
        for _ in range(1000):
            await asyncio.sleep(0)
        assert not read.done()
    assert await read is None


@on_postgresql
async def test_a_statement_that_takes_too_long_ends(store: Store) -> None:
    assert await store.fetch(lambda conn: conn.scalar(text("SHOW statement_timeout"))) == "1min"


@on_sqlite
async def test_rows_of_a_file_are_read_on_the_loop(store: Store) -> None:
    assert await store.read(lambda _: threading.get_ident()) == threading.get_ident()
    assert await store.fetch(lambda _: threading.get_ident()) != threading.get_ident()


async def test_a_listing_that_takes_long_delays_no_read_of_rows(store: Store) -> None:
    let_go = threading.Event()
    listings = [asyncio.create_task(store.fetch(lambda _: let_go.wait())) for _ in range(2 * THREADS)]
    async with holding(let_go, listings):
        assert await store.read(lambda conn: server_state.get(conn, "k")) is None
        assert not any(listing.done() for listing in listings)


async def test_reports_that_take_long_delay_no_body(store: Store) -> None:
    let_go = threading.Event()
    slow = (store.report(lambda _: let_go.wait(), OwnerId(each)) for each in range(2 * THREADS))
    reports = [asyncio.create_task(each) for each in slow]
    async with holding(let_go, reports):
        assert await store.fetch(lambda conn: server_state.get(conn, "k")) is None
        assert not any(report.done() for report in reports)


async def test_slow_reports_of_one_owner_leave_a_thread_to_others(store: Store) -> None:
    let_go, begun = threading.Event(), list[int]()

    def slow(_: Connection) -> None:
        begun.append(threading.get_ident())
        let_go.wait()

    quick = partial(server_state.get, key="k")
    reports = [asyncio.create_task(store.report(slow, OwnerId(1))) for _ in range(2 * REPORT_THREADS)]
    async with holding(let_go, reports):
        await until(lambda: begun)
        reports.pop(0).cancel()  # its client leaves; its thread goes on
        assert await store.report(quick, OwnerId(2)) is None
        assert await store.report(quick, ALL_OWNERS) is None
        assert len(begun) == 1
    assert len(begun) == 2 * REPORT_THREADS


async def test_reports_of_a_server_without_keys_take_all_threads(store: Store) -> None:
    together = threading.Barrier(REPORT_THREADS)
    reports = [store.report(lambda _: together.wait(PATIENCE_S), None) for _ in range(REPORT_THREADS)]
    assert sorted(await asyncio.gather(*reports)) == list(range(REPORT_THREADS))


@on_postgresql
async def test_connections_that_nobody_uses_are_closed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    await new_session(store)  # the writer's stays
    monkeypatch.setattr(stores, "IDLE_S", 0.0)
    await asyncio.gather(
        *(store.fetch(backends) for _ in range(50)), *(store.read(backends) for _ in range(50))
    )
    assert await until(lambda: store.read(backends), lambda others: len(others) == 1)
