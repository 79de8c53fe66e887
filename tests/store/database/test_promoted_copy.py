"""Failover to a copy of the database, and what nobody can know then."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import make_url, text
from sqlalchemy.exc import OperationalError

from skyrl_tinker.store import server_state
from skyrl_tinker.store.database.abstract_database import LeaseFence
from skyrl_tinker.store.database.postgresql import _LOST_ANSWER, _TIMELINE, PostgresDatabase
from skyrl_tinker.store.store import Store
from tests.store.database.test_postgresql import increase
from tests.support.postgres import Postgres, postgres_server
from tests.support.reads import reading


@pytest.fixture
def with_copy() -> Iterator[tuple[Postgres, Postgres]]:
    """A server of this test, and its copy."""
    with postgres_server() as server, server.copy() as copy:
        yield server, copy


async def test_a_promoted_copy_goes_on_with_all_that_was_acknowledged(
    with_copy: tuple[Postgres, Postgres], tmp_path: Path
) -> None:
    server, copy = with_copy
    store = Store.open(server.url_of_either(copy, "migrated"), tmp_path)
    for _ in range(20):
        await store.write(increase)
    server.stop("immediate")
    with pytest.raises(OperationalError):
        await store.write(increase)
    copy.promote()
    await store.write(increase)
    with reading(store) as conn:
        assert server_state.get(conn, "count") == 21
    await store.close()


async def test_a_lost_commit_is_not_taken_for_another_with_the_same_id_in_a_promoted_copy(
    with_copy: tuple[Postgres, Postgres],
) -> None:
    """The copy gives ids again that the server gave to what never reached it."""
    server, copy = with_copy
    ended: list[str] = []
    url = make_url(server.url_of_either(copy, "migrated"))
    database = PostgresDatabase(url, fence=LeaseFence(1, ended.append))
    writers = PostgresDatabase(url)
    with closing(writers.connect()) as conn:
        timeline = conn.info[_TIMELINE]
        with writers.writing(conn):
            increase(conn)
            lost_id = str(1 + int(conn.scalar(text("SELECT pg_current_xact_id()::text"))))
    server.stop("immediate")
    copy.promote()
    lost = OperationalError("COMMIT", None, OSError("cut"))
    with closing(writers.connect()) as conn:
        while writers._status(conn, lost_id) is None:
            with writers.writing(conn):
                increase(conn)
        assert writers._status(conn, lost_id) == "committed"
        assert writers._committed(lost_id, conn.info[_TIMELINE], lost)
    for each in (database, writers):
        with pytest.raises(OperationalError, match="cut"):
            each._committed(lost_id, timeline, lost)
    assert ended == [_LOST_ANSWER]
