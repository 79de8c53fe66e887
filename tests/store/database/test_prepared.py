"""Prepared statements do what SQLAlchemy's own execution of them does."""

import sqlite3
from typing import Any

import pytest
from sqlalchemy import Connection, bindparam, func, insert, select, text
from sqlalchemy.exc import OperationalError

from skyrl_tinker.domain.ids import FutureStatus, RequestKind
from skyrl_tinker.store import server_state
from skyrl_tinker.store.database import sqlite
from skyrl_tinker.store.database.prepared import Prepared
from skyrl_tinker.store.database.tables import Future, Request, ServerState
from skyrl_tinker.store.futures import completions, finish, outcomes, queue
from skyrl_tinker.store.futures.sample_submission import NewSample, submit_sample
from skyrl_tinker.store.store import Store
from tests.store.support.databases import on_sqlite
from tests.store.support.rows import base_sampler, new_session, sample
from tests.support.reads import reading

PENDING = select(Future.id, Future.kind, Future.sequence_ids, Future.digest, Future.status).where(
    Future.status == FutureStatus.PENDING, Future.kind == bindparam("kind"), Future.id > bindparam("after")
)


async def test_rows_have_the_values_that_sqlalchemy_reads(store: Store) -> None:
    sampler = await base_sampler(store, await new_session(store))
    for number in range(3):
        await sample(store, sampler, number)
    wanted = {"kind": RequestKind.SAMPLE, "after": 1}
    with reading(store) as conn:
        expected = conn.execute(PENDING, wanted).all()
        found = Prepared(PENDING).rows(conn, wanted)
    assert len(found) == 2
    assert [tuple(row) for row in found] == [tuple(row) for row in expected]
    assert found[0].kind is RequestKind.SAMPLE
    assert found[0].sequence_ids == list(expected[0].sequence_ids)


@pytest.mark.parametrize("value", [{"ä": [1, 2.5, None]}, 0, 2.5, "text", True, None])
async def test_json_is_written_and_read_as_sqlalchemy_does_it(store: Store, value: Any) -> None:
    """SQLite keeps a number in a column of JSON as a number."""
    put = Prepared(insert(ServerState), ["key", "value"])

    def op(conn: Connection) -> None:
        assert put.change(conn, {"key": "ours", "value": value}) == 1
        conn.execute(insert(ServerState), {"key": "theirs", "value": value})

    await store.write(op)
    with reading(store) as conn:
        stored = conn.execute(
            text("SELECT CAST(value AS TEXT) FROM server_state WHERE key IN ('ours', 'theirs')")
        )
        assert len(set(stored.scalars())) == 1
        assert server_state.get(conn, "ours") == value
        assert conn.scalar(select(ServerState.value).where(ServerState.key == "ours")) == value


async def test_they_are_undone_with_their_transaction(store: Store) -> None:
    """Also where SQLAlchemy itself ran nothing in it."""
    put = Prepared(insert(ServerState), ["key", "value"])

    def op(conn: Connection) -> None:
        put.change(conn, {"key": "k", "value": 1})
        raise ValueError("no")

    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            await store.write(op)
    with reading(store) as conn:
        assert server_state.get(conn, "k") is None


async def test_what_the_database_refuses_is_an_operational_error(store: Store) -> None:
    def op(conn: Connection) -> None:
        drop = "DROP TABLE requests" if conn.dialect.name == "sqlite" else "SET LOCAL statement_timeout = 1"
        conn.execute(text(drop))
        if conn.dialect.name == "sqlite":
            Prepared(insert(Request), ["future_id", "body"]).change(conn, {"future_id": 1, "body": b""})
        else:
            Prepared(select(func.pg_sleep(9))).rows(conn, {})

    with pytest.raises(OperationalError, match=r"no such table|statement timeout"):
        await store.write(op)
    with reading(store) as conn:
        assert queue.read_bodies(conn, [1]) == {}


@on_sqlite
async def test_the_statements_of_a_sample_are_compiled_once(store: Store) -> None:
    """SQLite may compile one anew each time that it gets values, in ten times the time of its run."""
    sampler = await base_sampler(store, await new_session(store))
    compiled: list[object] = []

    def note(*action: object) -> int:
        compiled.append(action)
        return sqlite3.SQLITE_OK

    def answer(conn: Connection, number: int) -> None:
        new = NewSample(sampler, number, bytes(32), b"{}", 1, 1, 1)
        accepted = submit_sample(conn, new, None).value()
        (row,) = queue.queued_after(conn, 0)
        finish.succeed(conn, row.id, "text/plain", b"")
        outcomes.find(conn, accepted.request_id)
        outcomes.finished_after(conn, 0)
        completions.finished_since(conn, sampler, 0, 0)

    def op(conn: Connection) -> None:
        sqlite.raw(conn).set_authorizer(note)  # which is asked when a statement is compiled
        answer(conn, 0)
        assert compiled
        compiled.clear()
        answer(conn, 1)
        sqlite.raw(conn).set_authorizer(None)

    await store.write(op)
    assert compiled == []
