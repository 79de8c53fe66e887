"""Prepared statements do what SQLAlchemy's own execution of them does."""

import pytest
from sqlalchemy import bindparam, insert, select, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection

from skyrl_tinker.domain.ids import FutureStatus, RequestKind
from skyrl_tinker.store import server_state
from skyrl_tinker.store.database.prepared import Prepared
from skyrl_tinker.store.database.tables import Future, Request, ServerState
from skyrl_tinker.store.futures import queue
from skyrl_tinker.store.store import Store
from tests.store.support.rows import base_sampler, new_session, sample

PENDING = select(Future.id, Future.kind, Future.sequence_ids, Future.digest, Future.status).where(
    Future.status == FutureStatus.PENDING, Future.kind == bindparam("kind"), Future.id > bindparam("after")
)


async def test_rows_have_the_values_that_sqlalchemy_reads(store: Store) -> None:
    sampler = await base_sampler(store, await new_session(store))
    for number in range(3):
        await sample(store, sampler, number)
    wanted = {"kind": RequestKind.SAMPLE, "after": 1}
    async with store.read() as conn:
        expected = (await conn.execute(PENDING, wanted)).all()
        found = Prepared(PENDING).rows(conn, wanted)
    assert len(found) == 2
    assert [tuple(row) for row in found] == [tuple(row) for row in expected]
    assert found[0].kind is RequestKind.SAMPLE
    assert found[0].sequence_ids == list(expected[0].sequence_ids)


async def test_json_is_written_as_sqlalchemy_writes_it(store: Store) -> None:
    value = {"ä": [1, 2.5, None]}
    put = Prepared(insert(ServerState), ["key", "value"])

    async def op(conn: AsyncConnection) -> None:
        assert put.run(conn, {"key": "ours", "value": value}) == 1
        await conn.execute(insert(ServerState), {"key": "theirs", "value": value})

    await store.write(op)
    async with store.read() as conn:
        stored = await conn.execute(text("SELECT value FROM server_state WHERE key IN ('ours', 'theirs')"))
        assert len(set(stored.scalars())) == 1
        assert await server_state.get(conn, "ours") == value


async def test_they_are_undone_with_their_transaction(store: Store) -> None:
    """Also where SQLAlchemy itself ran nothing in it."""
    put = Prepared(insert(ServerState), ["key", "value"])

    async def op(conn: AsyncConnection) -> None:
        put.run(conn, {"key": "k", "value": 1})
        raise ValueError("no")

    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            await store.write(op)
    async with store.read() as conn:
        assert await server_state.get(conn, "k") is None


async def test_what_the_database_refuses_is_an_operational_error(store: Store) -> None:
    async def op(conn: AsyncConnection) -> None:
        await conn.execute(text("DROP TABLE requests"))
        Prepared(insert(Request), ["future_id", "body"]).run(conn, {"future_id": 1, "body": b""})

    with pytest.raises(OperationalError, match="no such table"):
        await store.write(op)
    async with store.read() as conn:
        assert await queue.bodies(conn, [1]) == {}
