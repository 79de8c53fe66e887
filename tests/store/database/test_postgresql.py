"""What PostgreSQL can do to a store and SQLite cannot: be away, and lose the answer to a commit."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
from sqlalchemy import Connection, make_url, text
from sqlalchemy.exc import OperationalError

from skyrl_tinker.errors import StartupError
from skyrl_tinker.store import server_state
from skyrl_tinker.store.database.abstract_database import after_commit
from skyrl_tinker.store.database.migrate import migrate
from skyrl_tinker.store.database.postgresql import _TIMELINE, PostgresDatabase
from skyrl_tinker.store.store import Store
from tests.store.support.databases import on_postgresql
from tests.store.support.rows import new_session
from tests.support.postgres import Postgres

pytestmark = on_postgresql
COMMIT = b"COMMIT\0"


class Cutter:
    """Proxy before the server. Once `armed` it cuts the connection that commits next."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self.armed = False
        self.reaches_the_server = True
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._port))
                for one, other, watched in ((client, server, True), (server, client, False)):
                    threading.Thread(target=self._pass, args=(one, other, watched), daemon=True).start()

    def _pass(self, one: socket.socket, other: socket.socket, watched: bool) -> None:
        with suppress(OSError):
            while data := one.recv(1 << 16):
                if watched and self.armed and COMMIT in data:
                    self.armed = False
                    one.shutdown(socket.SHUT_RDWR)  # no answer comes through
                    if self.reaches_the_server:
                        other.sendall(data)
                        other.settimeout(10)
                        other.recv(1)
                    break
                other.sendall(data)
        for end in (one, other):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@contextmanager
def cut(url: str) -> Iterator[tuple[Cutter, str]]:
    parsed = make_url(url)
    assert parsed.port is not None
    cutter = Cutter(parsed.port)
    try:
        through = parsed.set(port=cutter.address[1])
        yield cutter, through.render_as_string(hide_password=False)
    finally:
        cutter.close()


def increase(conn: Connection) -> None:
    server_state.put(conn, "count", 1 + int(server_state.get(conn, "count") or 0))


def count(conn: Connection) -> int | None:
    value: int | None = server_state.get(conn, "count")
    return value


async def test_a_commit_whose_answer_is_lost_counts_once(url: str, tmp_path: Path) -> None:
    with cut(url) as (cutter, through):
        store = Store.open(through, tmp_path)
        await store.write(increase)
        cutter.armed = True
        await store.write(increase)
        assert not cutter.armed
        await store.write(increase)
        assert await store.read(count) == 3
        await store.close()


async def test_a_commit_that_never_arrived_is_an_error_and_undone(url: str, tmp_path: Path) -> None:
    with cut(url) as (cutter, through):
        store = Store.open(through, tmp_path)
        await store.write(increase)
        cutter.armed, cutter.reaches_the_server = True, False
        with pytest.raises(OperationalError):
            await store.write(increase)
        await store.write(increase)
        assert await store.read(count) == 2
        await store.close()


@pytest.mark.parametrize("how", ["fast", "immediate"])
async def test_while_the_server_is_away_all_fails_and_then_goes_on(
    store: Store, url: str, postgres: Postgres, how: str
) -> None:
    session = await new_session(store)
    assert await store.fetch(lambda conn: conn.scalar(text("SELECT session_id FROM sessions"))) == session
    postgres.stop(how)
    try:
        with pytest.raises(OperationalError):
            await store.read(count)
        for _ in range(2):
            with pytest.raises(OperationalError):
                await store.write(increase)
            with pytest.raises(OperationalError):
                await store.fetch(lambda conn: server_state.get(conn, "k"))
    finally:
        postgres.start()
    await asyncio.gather(*(store.write(increase) for _ in range(5)))
    assert await store.read(count) == 5
    assert await store.fetch(lambda conn: conn.scalar(text("SELECT session_id FROM sessions"))) == session


async def test_a_commit_that_the_server_does_not_know_is_undone(url: str) -> None:
    database = PostgresDatabase(make_url(url))
    with closing(database.connect()) as conn:
        timeline = conn.info[_TIMELINE]
    lost = OperationalError("COMMIT", None, OSError("cut"))
    assert not database._committed(str(1 << 40), timeline, lost)


async def test_who_stands_still_in_the_middle_of_a_write_loses_its_turn(url: str, store: Store) -> None:
    database = PostgresDatabase(make_url(url))

    async def stand_still() -> None:
        with closing(database.connect()) as conn, database.writing(conn):
            increase(conn)
            conn.execute(text("SET idle_in_transaction_session_timeout = '300ms'"))
            await store.write(increase)

    with pytest.raises(OperationalError):
        await stand_still()
    assert await store.read(count) == 1


def test_a_database_of_another_encoding_is_refused(url: str, postgres: Postgres) -> None:
    kind = "ENCODING 'SQL_ASCII' LC_COLLATE 'C' LC_CTYPE 'C'"
    postgres.execute(f"CREATE DATABASE letters TEMPLATE template0 {kind}")
    with pytest.raises(StartupError, match="encoding is SQL_ASCII, expected UTF8"):
        migrate(url.replace(str(make_url(url).database), "letters"))
    postgres.drop(postgres.url("letters"))


async def test_nobody_notices_a_restart_of_the_server_between_transactions(
    store: Store, postgres: Postgres
) -> None:
    told: list[int] = []

    def op(conn: Connection) -> None:
        increase(conn)
        after_commit(conn, lambda: told.append(len(told) + 1))

    for number in (1, 2, 3):
        await store.write(op)
        assert told[-1] == number
        assert await store.read(count) == number
        assert await store.fetch(lambda conn: server_state.get(conn, "count")) == number
        postgres.stop("immediate" if number == 1 else "fast")
        postgres.start()


async def test_a_cut_connection_in_the_middle_of_an_op_undoes_it_alone(
    store: Store, postgres: Postgres
) -> None:
    def dies(conn: Connection) -> None:
        increase(conn)
        pid = conn.scalar(text("SELECT pg_backend_pid()"))
        postgres.execute(f"SELECT pg_terminate_backend({pid}, 5000)")
        increase(conn)

    with pytest.raises(OperationalError):
        await store.write(dies)
    await store.write(increase)
    assert await store.read(count) == 1
