"""Statements that are sent ahead of their answers, many in one round trip to PostgreSQL."""

import asyncio
from pathlib import Path
from unittest.mock import Mock

import pytest
from sqlalchemy import Connection, bindparam, delete, func, insert, select, text
from sqlalchemy.exc import DataError, OperationalError

from skyrl_tinker.domain.ids import SamplingSessionId
from skyrl_tinker.errors import NotFoundError
from skyrl_tinker.store import server_state
from skyrl_tinker.store.database import group_commit, postgresql
from skyrl_tinker.store.database.group_commit import Later
from skyrl_tinker.store.database.prepared import Prepared
from skyrl_tinker.store.database.tables import Request, ServerState
from skyrl_tinker.store.futures import queue, record
from skyrl_tinker.store.futures.record import Accepted
from skyrl_tinker.store.model_records import ModelRow
from skyrl_tinker.store.store import Store
from tests.store.database.test_postgresql import cut
from tests.store.support.databases import on_postgresql
from tests.store.support.rows import queued, sample, step
from tests.support.reads import reading
from tests.support.waiting import PATIENCE_S

PUT = Prepared(insert(ServerState).returning(ServerState.key), ["key", "value"])
ORPHAN = Prepared(insert(Request), ["future_id", "body"])
DROP = Prepared(delete(Request).where(Request.future_id == bindparam("future_id")))
SLEEP = Prepared(select(func.pg_sleep(bindparam("seconds"))))


@pytest.fixture(autouse=True)
def whole_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, what waits is committed together."""
    monkeypatch.setattr(group_commit, "MAX_HOLD_S", PATIENCE_S)


def put(conn: Connection, key: str) -> Later[str]:
    sent = PUT.send(conn, {"key": key, "value": 1})

    def value() -> str:
        row = sent.row()
        assert row is not None
        return str(row.key)

    return Later(value)


def orphan(conn: Connection) -> None:
    """Break a constraint, which nobody waits to hear."""
    ORPHAN.send(conn, {"future_id": 77, "body": b""})


def keys(store: Store) -> set[str]:
    with reading(store) as conn:
        return set(conn.scalars(select(ServerState.key)))


async def test_ops_send_before_any_of_them_reads(store: Store) -> None:
    order: list[str] = []

    def op(conn: Connection, key: str) -> Later[str]:
        order.append(f"sent {key}")
        later = put(conn, key)

        def value() -> str:
            order.append(f"read {key}")
            return later.value()

        return Later(value)

    await store.write(lambda conn: server_state.put(conn, "k", 0))
    answers = await asyncio.gather(*(store.write(lambda conn, key=key: op(conn, key)) for key in "abc"))  # type: ignore[misc]
    assert answers == ["a", "b", "c"]
    assert order == [f"{what} {key}" for what in ("sent", "read") for key in "abc"]
    assert keys(store) >= set("abc")


async def test_an_error_that_nobody_waits_for_fails_its_op_alone(store: Store) -> None:
    results = await asyncio.gather(
        store.write(lambda conn: put(conn, "a")),
        store.write(orphan),
        store.write(lambda conn: put(conn, "b")),
        return_exceptions=True,
    )
    assert results[0::2] == ["a", "b"]
    assert "foreign key" in str(results[1]).lower()
    assert {"a", "b"} <= keys(store)


async def test_an_op_whose_statement_fails_unheard_is_not_acknowledged(store: Store) -> None:
    def both(conn: Connection) -> None:
        put(conn, "lost")
        orphan(conn)

    for _ in range(2):
        with pytest.raises(Exception, match=r"(?i)foreign key"):
            await store.write(both)
    await store.write(lambda conn: put(conn, "kept"))
    assert keys(store) & {"lost", "kept"} == {"kept"}


async def test_sqlalchemy_sees_what_was_sent(store: Store) -> None:
    def op(conn: Connection) -> object:
        put(conn, "sent")
        found = server_state.get(conn, "sent")
        put(conn, "again")
        return found

    assert await store.write(op) == 1
    assert {"sent", "again"} <= keys(store)


async def test_a_value_that_cannot_be_read_is_an_error_of_its_op(store: Store) -> None:
    def op(conn: Connection) -> Later[int]:
        put(conn, "undone")
        return Later(lambda: 1 // 0)

    good, bad = await asyncio.gather(
        store.write(lambda conn: put(conn, "good")), store.write(op), return_exceptions=True
    )
    assert good == "good"
    assert isinstance(bad, ZeroDivisionError)
    assert keys(store) & {"undone", "good"} == {"good"}


@on_postgresql
async def test_a_slow_statement_that_was_sent_fails_its_op_alone(store: Store) -> None:
    def slow(conn: Connection) -> None:
        conn.execute(text("SET LOCAL statement_timeout = 1"))
        SLEEP.send(conn, {"seconds": 9})

    good, bad = await asyncio.gather(
        store.write(lambda conn: put(conn, "good")), store.write(slow), return_exceptions=True
    )
    assert good == "good"
    assert isinstance(bad, OperationalError)
    assert "statement timeout" in str(bad)


@on_postgresql
async def test_what_is_sent_by_many_ops_is_answered_in_one_round_trip(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver keeps what is sent until it is read, or a buffer is full."""
    await store.write(lambda conn: put(conn, "first"))
    waits = 0
    fetch = postgresql.fetch

    def counted(cursor: object, sql: str) -> list[object]:
        nonlocal waits
        waits += cursor.pgresult is None  # type: ignore[attr-defined]
        return fetch(cursor, sql)  # type: ignore[arg-type]

    monkeypatch.setattr(postgresql, "fetch", counted)
    await asyncio.gather(*(store.write(lambda conn, n=n: put(conn, f"k{n}")) for n in range(100)))  # type: ignore[misc]
    assert waits <= 2, "one of the first op, which ran while the others arrived, and one of the rest"


async def test_many_ops_have_their_rows_in_the_order_in_which_they_came(
    store: Store, sampler: SamplingSessionId
) -> None:
    accepted = await asyncio.gather(*(sample(store, sampler, number) for number in range(100)))
    rows = await queued(store)
    assert [row.request_id for row in rows] == [each.request_id for each in accepted]
    with reading(store) as conn:
        assert set(queue.read_bodies(conn, [row.id for row in rows]).values()) == {b"sample"}


@on_postgresql
async def test_what_many_ops_insert_is_one_statement(
    store: Store, sampler: SamplingSessionId, model: ModelRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgresql, "send", send := Mock(wraps=postgresql.send))
    await asyncio.gather(
        *(sample(store, sampler, number) for number in range(100)),
        *(step(store, model, number) for number in range(1, 101)),
    )
    sent = [call.args[1] for call in send.call_args_list]
    of_futures = [sql for sql in sent if sql.startswith("INSERT INTO futures")]
    assert len(of_futures) <= 3, (
        "one of the first op, which ran while the others arrived, and two of the rest"
    )
    assert len([sql for sql in sent if sql.startswith("INSERT INTO requests")]) <= 2


async def test_samples_that_race_with_the_same_number_get_one_answer(
    store: Store, sampler: SamplingSessionId
) -> None:
    numbers = [*range(20), *range(20)]
    accepted = await asyncio.gather(*(sample(store, sampler, number) for number in numbers))
    assert [each.request_id for each in accepted[:20]] == [each.request_id for each in accepted[20:]]
    assert [each.created for each in accepted] == [True] * 20 + [False] * 20


async def test_a_submission_that_cannot_be_stored_fails_alone(
    store: Store, sampler: SamplingSessionId
) -> None:
    with_nul = SamplingSessionId("no\0such")
    good, bad, late = await asyncio.gather(
        sample(store, sampler, 0),
        sample(store, with_nul, 0),
        sample(store, sampler, 1),
        return_exceptions=True,
    )
    assert isinstance(bad, (DataError, NotFoundError))
    assert isinstance(good, Accepted)
    assert isinstance(late, Accepted)
    assert [row.request_id for row in await queued(store)] == [good.request_id, late.request_id]


async def test_a_body_of_no_request_fails_its_op_alone(store: Store) -> None:
    good, bad = await asyncio.gather(
        store.write(lambda conn: put(conn, "good")),
        store.write(lambda conn: record.insert_body(conn, 77, b"")),
        return_exceptions=True,
    )
    assert good == "good"
    assert "foreign key" in str(bad).lower()
    assert keys(store) >= {"good"}


async def test_what_waits_to_be_sent_is_there_for_all_that_comes_after_it(
    store: Store, sampler: SamplingSessionId
) -> None:
    await sample(store, sampler, 0)
    (row,) = await queued(store)
    key = {"future_id": row.id}

    def op(conn: Connection) -> list[object]:
        DROP.send(conn, key)
        record.insert_body(conn, row.id, b"new")
        found = queue.read_bodies(conn, [row.id])
        DROP.send(conn, key)
        record.insert_body(conn, row.id, b"newer")
        DROP.send(conn, key)
        return [found, queue.read_bodies(conn, [row.id])]

    assert await store.write(op) == [{row.id: b"new"}, {}]


@on_postgresql
@pytest.mark.parametrize("arrives", [True, False])
async def test_a_commit_that_is_sent_with_its_statements_may_be_in_doubt(
    url: str, tmp_path: Path, arrives: bool
) -> None:
    with cut(url) as (cutter, through):
        store = Store.open(through, tmp_path)
        await store.write(lambda conn: put(conn, "a"))
        cutter.armed, cutter.reaches_the_server = True, arrives
        if arrives:
            assert await store.write(lambda conn: put(conn, "b")) == "b"
        else:
            with pytest.raises(OperationalError):
                await store.write(lambda conn: put(conn, "b"))
        assert not cutter.armed
        await store.write(lambda conn: put(conn, "c"))
        assert keys(store) & set("abc") == ({"a", "b", "c"} if arrives else {"a", "c"})
        await store.close()
