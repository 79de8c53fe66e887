"""Group commit: fast together, alone in failure, on disk when acknowledged."""

import asyncio
import gc
import sqlite3
import threading
import weakref
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from sqlalchemy import Connection, text
from sqlalchemy.exc import IntegrityError, OperationalError

from skyrl_tinker.domain.ids import SessionId
from skyrl_tinker.errors import SkyrlTinkerError, StartupError, UserError
from skyrl_tinker.store import server_state
from skyrl_tinker.store.database import group_commit, sqlite
from skyrl_tinker.store.database.abstract_database import after_commit, is_of_statement
from skyrl_tinker.store.database.group_commit import LARGE_BYTES, MAX_BYTES, OVERTAKEN, Later
from skyrl_tinker.store.store import Store, write_once
from tests.store.support.databases import on_sqlite
from tests.store.support.rows import new_session
from tests.support.reads import reading
from tests.support.waiting import PATIENCE_S, until


async def value(store: Store, key: str) -> object:
    with reading(store) as conn:
        return server_state.get(conn, key)


def insert(key: str) -> str:
    return f"INSERT INTO server_state VALUES ('{key}', '1')"


@pytest.fixture
def whole_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, what waits is committed together."""
    monkeypatch.setattr(group_commit, "MAX_HOLD_S", PATIENCE_S)


async def test_a_failing_op_fails_alone(store: Store) -> None:
    def bad(conn: Connection) -> None:
        server_state.put(conn, "bad", 1)
        raise UserError("no")

    results = await asyncio.gather(
        *(store.write(lambda conn, i=i: server_state.put(conn, f"k{i}", i)) for i in range(5)),  # type: ignore[misc]
        store.write(bad),
        *(store.write(lambda conn, i=i: server_state.put(conn, f"k{i}", i)) for i in range(5, 10)),  # type: ignore[misc]
        return_exceptions=True,
    )
    assert [type(result) for result in results if result is not None] == [UserError]
    assert [await value(store, f"k{i}") for i in range(10)] == list(range(10))
    assert await value(store, "bad") is None


async def test_a_failing_op_that_comes_first_fails_alone(store: Store) -> None:
    def bad(conn: Connection) -> None:
        server_state.put(conn, "bad", 1)
        raise UserError("no")

    results = await asyncio.gather(
        store.write(bad), store.write(lambda conn: server_state.put(conn, "good", 1)), return_exceptions=True
    )
    assert isinstance(results[0], UserError)
    assert results[1] is None
    assert (await value(store, "bad"), await value(store, "good")) == (None, 1)


async def test_a_broken_constraint_fails_alone(store: Store) -> None:
    def orphan(conn: Connection) -> None:
        conn.execute(text("INSERT INTO requests (future_id, body) VALUES (77, '0')"))

    good, bad, late = await asyncio.gather(
        store.write(lambda conn: conn.execute(text(insert("a")))),
        store.write(orphan),
        store.write(lambda conn: conn.execute(text(insert("b")))),
        return_exceptions=True,
    )
    assert isinstance(bad, IntegrityError)
    assert not isinstance(good, Exception)
    assert not isinstance(late, Exception)
    assert (await value(store, "a"), await value(store, "b")) == (1, 1)


async def test_an_op_in_which_the_disk_fails_undoes_what_it_would_be_committed_with(
    store: Store, whole_batches: None
) -> None:
    """SQLite may have undone all of it; so nobody is told that it is on disk."""
    fails = Mock(side_effect=OperationalError("INSERT", None, OSError("disk I/O error")))
    results = await asyncio.gather(
        *(store.write(lambda conn, key=key: server_state.put(conn, key, 1)) for key in "ab"),  # type: ignore[misc]
        store.write(fails),
        store.write(lambda conn: server_state.put(conn, "c", 1)),
        return_exceptions=True,
    )
    assert [type(result) for result in results] == [OperationalError] * 3 + [type(None)]
    assert [await value(store, key) for key in "abc"] == [None, None, 1]


async def test_a_statement_that_the_database_fails_fails_alone(store: Store, whole_batches: None) -> None:
    """As often as it is tried again: it must not take the others with it each time."""

    def bad(conn: Connection) -> None:
        if conn.dialect.name == "sqlite":
            conn.execute(text("SELECT * FROM no_such"))
        conn.execute(text("SET LOCAL statement_timeout = 1"))
        conn.execute(text("SELECT pg_sleep(9)"))

    results = await asyncio.gather(
        store.write(lambda conn: server_state.put(conn, "a", 1)),
        store.write(bad),
        store.write(lambda conn: server_state.put(conn, "b", 1)),
        return_exceptions=True,
    )
    assert [type(result) for result in results] == [type(None), OperationalError, type(None)]
    assert isinstance(results[1], OperationalError)
    assert is_of_statement(results[1])
    assert [await value(store, key) for key in "ab"] == [1, 1]


async def test_only_what_is_committed_has_its_callback_called(store: Store, whole_batches: None) -> None:
    called: list[str] = []
    await asyncio.gather(
        store.write(lambda conn: server_state.put(conn, "k", 1), lambda: called.append("good")),
        store.write(Mock(side_effect=UserError("no")), lambda: called.append("bad")),
        return_exceptions=True,
    )
    assert called == ["good"]


async def test_what_waits_for_the_commit_is_called_once_and_only_after_one(
    store: Store, whole_batches: None
) -> None:
    """A batch with a failing op runs twice."""
    called: list[str] = []

    def told(key: str, error: Exception | None = None) -> Coroutine[Any, Any, None]:
        def op(conn: Connection) -> None:
            server_state.put(conn, key, 1)
            after_commit(conn, lambda: called.append(key))
            assert key not in called
            if error is not None:
                raise error

        return store.write(op)

    await asyncio.gather(told("a"), told("bad", UserError("no")), told("b"), return_exceptions=True)
    assert called == ["a", "b"]
    disk = OperationalError("INSERT", None, OSError("disk I/O error"))
    await asyncio.gather(told("c"), told("bad", disk), return_exceptions=True)
    with pytest.raises(UserError):
        await told("alone", UserError("no"))
    assert called == ["a", "b"]
    await told("last")
    assert called == ["a", "b", "last"]


@on_sqlite
async def test_many_writers_share_a_commit(store: Store, url: str, whole_batches: None) -> None:
    await new_session(store)
    before = wal_commits(url)
    assert before > 0
    await asyncio.gather(
        *(store.write(lambda conn, i=i: server_state.put(conn, f"k{i}", i)) for i in range(200))  # type: ignore[misc]
    )
    assert wal_commits(url) - before < 50


async def test_a_batch_ends_once_it_has_kept_other_processes_waiting(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, events = 0.0, list[str]()

    def op(conn: Connection) -> None:
        nonlocal now
        now += 0.6 * group_commit.MAX_HOLD_S
        events.append("ran")

    monkeypatch.setattr(group_commit, "time", SimpleNamespace(monotonic=lambda: now))
    await asyncio.gather(*(store.write(op, lambda: events.append("committed")) for _ in range(4)))
    assert events == ["ran", "ran", "committed", "committed"] * 2


@pytest.mark.parametrize(("part", "together"), [(0.5, 2), (0.6, 1), (2.0, 1)])
async def test_a_batch_ends_before_it_sends_more_than_its_bytes(
    store: Store, part: float, together: int
) -> None:
    """What is sent at its end takes its time behind the look at the clock."""
    events: list[str] = []

    async def write(size: int) -> None:
        op = partial(_sent_later, events)
        await store.write(op, lambda: events.append("committed"), size)

    await asyncio.gather(*(write(int(part * MAX_BYTES)) for _ in range(4)))
    assert events == [*together * ["sent"], *together * ["committed"]] * (4 // together)


def _sent_later(events: list[str], conn: Connection) -> Later[None]:
    return Later(lambda: events.append("sent"))


async def test_small_writes_overtake_large_ones_which_come_all_the_same(store: Store) -> None:
    done: list[str] = []

    def writing(name: str, size: int) -> Coroutine[Any, Any, None]:
        return store.write(lambda conn: done.append(name), size=size)

    large, small = LARGE_BYTES + 1, OVERTAKEN + 2
    await asyncio.gather(
        *(writing(f"large {number}", large) for number in range(2)),
        *(writing(f"small {number}", 0) for number in range(small)),
    )
    expected = [f"small {number}" for number in range(small)]
    expected.insert(OVERTAKEN, "large 0")
    assert done == [*expected, "large 1"]


def wal_commits(url: str) -> int:
    """Commit frames in the write-ahead log (a frame's header has the database size, else 0, at byte 4)."""
    log = Path(url.removeprefix("sqlite:///") + "-wal").read_bytes()
    page = int.from_bytes(log[8:12], "big")
    frames = range(32, len(log), 24 + page)
    return sum(int.from_bytes(log[at + 4 : at + 8], "big") != 0 for at in frames)


@on_sqlite
async def test_an_acknowledged_write_survives_the_process(store: Store, url: str) -> None:
    session = await new_session(store)
    with sqlite3.connect(url.removeprefix("sqlite:///")) as reader:  # while the store is still open
        rows = reader.execute("SELECT session_id FROM sessions").fetchall()
    reader.close()
    assert rows == [(session,)]


async def test_writes_are_there_after_reopening(store: Store, url: str) -> None:
    await store.write(lambda conn: server_state.put(conn, "engine", {"state": "ready", "detail": ""}))
    await store.close()
    again = Store.open(url)
    try:
        assert await value(again, "engine") == {"state": "ready", "detail": ""}
    finally:
        await again.close()


@on_sqlite
async def test_commits_are_synced_and_foreign_keys_hold(store: Store) -> None:
    def pragma(conn: Connection, name: str) -> object:
        return conn.scalar(text(f"PRAGMA {name}"))

    assert await store.write(lambda conn: pragma(conn, "synchronous")) == 2
    assert await store.write(lambda conn: pragma(conn, "foreign_keys")) == 1
    with reading(store) as conn:
        assert pragma(conn, "journal_mode") == "wal"


async def test_a_read_does_not_wait_for_a_write_in_progress(store: Store) -> None:
    await store.write(lambda conn: server_state.put(conn, "k", "old"))
    inside, let_go = threading.Event(), threading.Event()

    def slow(conn: Connection) -> None:
        server_state.put(conn, "k", "new")
        inside.set()
        let_go.wait()

    writing = asyncio.create_task(store.write(slow))
    await asyncio.to_thread(inside.wait)
    async with asyncio.timeout(60):
        assert await value(store, "k") == "old"
    let_go.set()
    await writing
    assert await value(store, "k") == "new"


async def test_a_read_sees_one_state_throughout(store: Store) -> None:
    await store.write(lambda conn: server_state.put(conn, "k", 1))
    with reading(store) as conn:
        assert server_state.get(conn, "k") == 1
        await store.write(lambda conn: server_state.put(conn, "k", 2))
        assert server_state.get(conn, "k") == 1
    assert await value(store, "k") == 2


async def test_a_cancelled_caller_breaks_nothing(store: Store) -> None:
    inside, let_go = threading.Event(), threading.Event()

    def slow(conn: Connection) -> None:
        server_state.put(conn, "slow", 1)
        inside.set()
        let_go.wait()

    running = asyncio.create_task(store.write(slow))
    await asyncio.to_thread(inside.wait)
    waiting = asyncio.create_task(store.write(lambda conn: server_state.put(conn, "waiting", 1)))
    other = asyncio.create_task(store.write(lambda conn: server_state.put(conn, "other", 1)))
    await asyncio.sleep(0)
    running.cancel()
    waiting.cancel()
    await asyncio.sleep(0)
    let_go.set()
    await other
    assert running.cancelled()
    assert waiting.cancelled()
    assert await value(store, "other") == 1
    assert await value(store, "waiting") is None, "nobody asks for it any more, and it had not begun"


@on_sqlite
async def test_a_full_disk_acknowledges_nothing_that_is_not_there(store: Store) -> None:
    pages = await store.write(lambda conn: conn.scalar(text("PRAGMA page_count")))
    await store.write(lambda conn: conn.execute(text(f"PRAGMA max_page_count = {pages + 20}")))

    def put(key: str, size: int) -> object:
        return store.write(lambda conn: server_state.put(conn, key, "x" * size))

    results = await asyncio.gather(
        put("a", 10), put("b", 10), put("huge", 1 << 20), put("c", 10), return_exceptions=True
    )
    assert isinstance(results[2], OperationalError)
    for key, result in zip(("a", "b", "huge", "c"), results, strict=True):
        assert (await value(store, key) is not None) == (result is None)
    await put("after", 10)
    assert await value(store, "after") is not None


@on_sqlite
async def test_where_no_transaction_can_begin_every_caller_learns_it(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sqlite, "BEGIN_WRITE", "BEGIN NEVER")
        results = await asyncio.gather(
            *(store.write(lambda conn: server_state.put(conn, "k", 1)) for _ in range(3)),
            return_exceptions=True,
        )
    assert [type(result) for result in results] == [OperationalError] * 3
    await store.write(lambda conn: server_state.put(conn, "k", 2))
    assert await value(store, "k") == 2


@on_sqlite
async def test_a_fetch_that_is_given_up_keeps_its_connection_to_its_end(store: Store) -> None:
    inside, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        inside.set()
        let_go.wait()

    def slow(conn: Connection) -> None:
        conn.connection.create_function("hold", 0, hold)  # type: ignore[attr-defined]
        conn.execute(text("SELECT hold()"))

    fetching = asyncio.create_task(store.fetch(slow))
    await asyncio.to_thread(inside.wait)
    fetching.cancel()
    await asyncio.wait((fetching,))
    assert fetching.cancelled()
    async with asyncio.timeout(60):
        assert await store.fetch(lambda conn: server_state.get(conn, "k")) is None, "on another connection"
    let_go.set()
    for _ in range(2):
        assert await store.fetch(lambda conn: server_state.get(conn, "k")) is None


@on_sqlite
async def test_a_fetch_sees_one_state_throughout_and_leaves_the_loop_free(store: Store, url: str) -> None:
    loop = threading.get_ident()
    threads: list[int] = []

    def look(conn: Connection) -> list[object]:
        conn.connection.create_function("note", 0, lambda: threads.append(threading.get_ident()))  # type: ignore[attr-defined]
        before = server_state.get(conn, "k")
        conn.execute(text("SELECT note()"))
        write_once(url, lambda conn: server_state.put(conn, "k", "new"))
        return [before, server_state.get(conn, "k")]

    await store.write(lambda conn: server_state.put(conn, "k", "old"))
    assert await store.fetch(look) == ["old", "old"]
    assert await store.fetch(lambda conn: server_state.get(conn, "k")) == "new"
    assert threads
    assert loop not in threads


async def test_an_error_in_a_fetch_is_its_callers_and_the_connection_serves_on(store: Store) -> None:
    def fails(conn: Connection) -> None:
        server_state.get(conn, "k")
        raise UserError("no")

    for _ in range(2):
        with pytest.raises(UserError):
            await store.fetch(fails)
    assert await store.fetch(lambda conn: server_state.get(conn, "k")) is None


async def test_close_writes_what_was_accepted(url: str) -> None:
    store = Store.open(url)
    writes = [
        asyncio.create_task(store.write(lambda conn, i=i: server_state.put(conn, f"k{i}", i)))  # type: ignore[misc]
        for i in range(20)
    ]
    await asyncio.sleep(0)
    await store.close()
    assert all(write.done() for write in writes)
    again = Store.open(url)
    assert [await value(again, f"k{i}") for i in range(20)] == list(range(20))
    await again.close()


async def test_a_closed_store_refuses(url: str) -> None:
    store = Store.open(url)
    await store.close()
    with pytest.raises(SkyrlTinkerError, match="the store is closed"):
        await new_session(store)


async def test_two_processes_write_by_turns(store: Store, url: str) -> None:
    other = Store.open(url)
    sessions = await asyncio.gather(*(new_session(s) for _ in range(100) for s in (store, other)))
    await other.close()
    assert len(set[SessionId](sessions)) == 200


async def test_a_busy_process_does_not_starve_another(store: Store, url: str) -> None:
    busy = Store.open(url)

    async def keep_writing() -> None:
        while True:
            await asyncio.gather(
                *(busy.write(lambda conn: server_state.put(conn, "busy", 1)) for _ in range(20))
            )

    hammering = asyncio.create_task(keep_writing())
    async with asyncio.timeout(PATIENCE_S):  # one that starves waits for as long as the other writes
        for i in range(50):
            await store.write(lambda conn, i=i: server_state.put(conn, "other", i))  # type: ignore[misc]
    hammering.cancel()
    await asyncio.gather(hammering, return_exceptions=True)
    await busy.close()


@pytest.mark.parametrize(
    "named",
    [
        "postgresql+asyncpg://u:secret@h/d",
        "sqlite+aiosqlite:///x.db",
        "sqlite://",
        "mysql://h/d",
        "x",
        "postgresql+psycopg://h:a/d",
    ],
)
async def test_other_databases_are_refused_by_name(named: str) -> None:
    with pytest.raises(StartupError, match=r"expected sqlite:///.* or postgresql") as refused:
        Store.open(named)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("others", [0, 3])
async def test_what_a_refused_write_would_have_written_is_free_at_once(store: Store, others: int) -> None:
    """Bodies are large, and a collection may be far off: `freeze_gc`."""
    body = Body()
    gone = weakref.ref(body)

    def refused(conn: Connection, body: Body = body) -> None:
        server_state.put(conn, "bad", body.size)
        raise UserError("no")

    gc.disable()
    try:
        writes = [
            *(store.write(lambda conn: server_state.put(conn, "k", 1)) for _ in range(others)),
            store.write(refused),
        ]
        del body, refused
        with pytest.raises(UserError):
            await asyncio.gather(*writes)
        del writes
        await until(lambda: gone() is None)
    finally:
        gc.enable()


class Body:
    size = 1
