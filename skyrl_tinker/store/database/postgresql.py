"""PostgreSQL as the store uses it. Needs psycopg (the extra `postgresql`).

Writers of all processes take their turns by an advisory lock that ends with the transaction, so that ids are
in the order of commits, as readers that go on from the last id need it.
"""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sqlalchemy import URL, Connection, NullPool, create_engine, event
from sqlalchemy.exc import DataError, DBAPIError, OperationalError, ProgrammingError

from skyrl_tinker.bundled import install
from skyrl_tinker.errors import StartupError
from skyrl_tinker.store.database.abstract_database import SKEW, Database, LeaseFence, json_text

if TYPE_CHECKING:
    import psycopg

DRIVER = "postgresql+psycopg"
WRITERS = 7_310_593_858_020_254_313
"""Advisory lock of the transaction that writes; such locks are of one database."""
_RETRY_S = 0.5
_NOW = "extract(epoch FROM clock_timestamp())::float8"
_READ = (
    "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; "
    f"SET LOCAL statement_timeout = '60s'; SET LOCAL lock_timeout = '50s'; SELECT {_NOW}"
)
"""A statement that takes longer gives its thread to others; one that waits for a lock says so before."""
_WRITE = f"BEGIN; SELECT pg_current_xact_id()::text, {_NOW} FROM pg_advisory_xact_lock({WRITERS}) AS turn"
_EPOCH = "; SELECT (value->>'epoch')::bigint FROM server_state WHERE key = 'lease'"
"""Behind _WRITE: a separate statement sees the commits before the turn came."""
_TIMELINE = "SELECT left(pg_walfile_name(pg_current_wal_lsn()), 8)"
"""Number of the history of the server's data; PostgreSQL counts them."""
_PIPELINE = "pipeline"
"""Where a connection keeps the driver's pipeline while answers to statements are awaited."""
_DEFERRED = "deferred"
"""Where a connection keeps statements that are sent right before any other."""
_LOST_ANSWER = "the database is a promoted copy of which nobody knows whether it has the last commit"
_PARAMETERS = {
    "application_name": "skyrl-tinker",
    "connect_timeout": "10",
    "keepalives_idle": "5",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "20000",
    "options": "-c tcp_keepalives_idle=5 -c tcp_keepalives_interval=5 -c tcp_keepalives_count=3"
    " -c idle_in_transaction_session_timeout=20s",
}
"""Of a connection, unless the URL has others: a host that is gone is noticed within about 20 s, here and by
the server, where it would hold the turn of all writers. A process that stands still loses it as soon.
"""
_log = logging.getLogger(__name__)


class PostgresDatabase(Database):
    """Database of a server of PostgreSQL 13 or newer."""

    local = False

    def __init__(self, url: URL, home: Path | None = None, fence: LeaseFence | None = None) -> None:
        """`home`: base of relative `file_paths`; without it these fail. StartupError without psycopg."""
        self._fence = fence
        try:
            import psycopg  # noqa: F401  (an extra)
        except ImportError as error:
            raise StartupError(f"database_url needs psycopg: {install('postgresql')} ({error})") from error
        self.engine = create_engine(
            url,
            poolclass=NullPool,
            isolation_level="AUTOCOMMIT",  # transactions are begun explicitly
            json_serializer=json_text,
            connect_args={name: value for name, value in _PARAMETERS.items() if name not in url.query},
            execution_options={"home": home},
        )
        event.listen(self.engine, "do_connect", _connect)
        event.listen(self.engine, "connect", _note_timeline)
        event.listen(self.engine, "connect", _send_lists_as_bytes)
        event.listen(self.engine, "before_cursor_execute", _leave_before)

    @contextmanager
    def reading(self, conn: Connection) -> Iterator[None]:
        cursor = _begin(conn, _READ)
        while cursor.nextset():
            pass  # up to the time
        row = cursor.fetchone()
        assert row is not None
        self._note_clock(conn, row[0])
        with _undone(conn):
            yield
            _commit(conn)

    @contextmanager
    def _writing(self, conn: Connection) -> Iterator[None]:
        cursor = _begin(conn, _WRITE if self._fence is None else _WRITE + _EPOCH)
        cursor.nextset()
        row = cursor.fetchone()
        assert row is not None
        transaction, timeline = str(row[0]), conn.info[_TIMELINE]
        self._note_clock(conn, row[1])
        with _undone(conn):
            if self._fence is not None:
                cursor.nextset()
                self._fence.check(cursor.fetchone())
            yield
        try:
            _commit(conn)
        except Exception as error:  # any error: all that counts is whether it was committed
            if self.usable(conn):  # the server says that it is undone, or was not asked: they failed
                with suppress(Exception):
                    raw(conn).rollback()
                raise
            if not isinstance(error, OperationalError):
                raise
            _log.warning("the answer to a commit was lost, asking for its fate: %s", error)
            if not self._committed(transaction, timeline, error):
                raise

    @contextmanager
    def sending(self, conn: Connection) -> Iterator[None]:
        try:
            yield
        except BaseException:  # any error: answers must not go to the next user
            _abandon(conn)
            raise
        _leave(conn)

    def usable(self, conn: Connection) -> bool:
        return not conn.invalidated and not raw(conn).closed

    def release(self, conn: Connection) -> None:
        if not conn.invalidated:
            conn.invalidate()  # or SQLAlchemy would roll back, which fails on a broken one
        conn.close()

    def _note_clock(self, conn: Connection, now: float) -> None:
        conn.info[SKEW] = self.skew_s = now - time.time()

    def _committed(self, transaction: str, timeline: str | None, lost: OperationalError) -> bool:
        """Return whether a transaction was committed whose connection broke in its commit.

        Blocks while the server is away: until then no caller can be told the outcome. Raises `lost` where a
        copy was promoted: that may have given the same id to another transaction.
        """
        while True:
            try:
                with self.connect() as conn:
                    if conn.info[_TIMELINE] == timeline:
                        return self._status(conn, transaction) == "committed"
            except DBAPIError:
                time.sleep(_RETRY_S)
            else:
                if self._fence is not None:
                    self._fence.end(_LOST_ANSWER)
                raise lost

    def _status(self, conn: Connection, transaction: str) -> str | None:
        """Return `committed` or `aborted`, None if nobody knows the transaction; waits while it runs."""
        while True:
            try:
                row = execute(conn, "SELECT pg_xact_status(%s::xid8)", (transaction,)).fetchone()
            except DataError:  # in the future of this server
                return None
            status = None if row is None or row[0] is None else str(row[0])
            if status != "in progress":
                return status
            time.sleep(_RETRY_S)


class Deferred(Protocol):
    def send(self, conn: Connection) -> None: ...


def _note_timeline(connection: "psycopg.Connection[Any]", record: Any) -> None:
    """Note which history of the data the server goes on with: a copy begins another when it is promoted.

    None where the server does not tell: it is a copy, or keeps its data otherwise.
    """
    import psycopg

    try:
        row = connection.execute(_TIMELINE).fetchone()
    except psycopg.Error:
        row = None
    if not connection.closed:  # else the first to use it sees that
        connection.rollback()
    record.info[_TIMELINE] = None if row is None else row[0]


def _connect(dialect: Any, _: Any, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Connect, to a database whose texts are UTF-8: those of another would be bytes, or lose letters."""
    connection = dialect.connect(*arguments, **options)
    encoding = connection.info.parameter_status("server_encoding")
    if encoding != "UTF8":
        connection.close()
        raise StartupError(
            f"database_url: the database's encoding is {encoding}, expected UTF8: make one by "
            "createdb --encoding UTF8 --template template0"
        )
    return connection


def _send_lists_as_bytes(connection: "psycopg.Connection[Any]", _: Any) -> None:
    """Send arrays as bytes: bodies are twice as long in text."""
    from psycopg.types.array import ListBinaryDumper

    connection.adapters.register_dumper(list, ListBinaryDumper)


def raw(conn: Connection) -> "psycopg.Connection[Any]":
    """Return the driver's connection beneath one of PostgresDatabase."""
    driver: psycopg.Connection[Any] | None = conn.connection.driver_connection
    assert driver is not None
    return driver


def execute(conn: Connection, sql: str, parameters: Any = None) -> "psycopg.Cursor[Any]":
    """Run SQL in the driver. Raises SQLAlchemy's OperationalError, and DataError for text with a NUL."""
    _leave(conn)
    with _translated(sql):
        return raw(conn).execute(sql, parameters)


def send(conn: Connection, sql: str, parameters: Any = None) -> "psycopg.Cursor[Any]":
    """Run SQL of one statement without waiting for its answer, for which `fetch` waits.

    Whatever runs next may raise its error. Unsent statements wait for the answers to sent ones.
    """
    send_deferred(conn)
    with _translated(sql):
        if _PIPELINE not in conn.info:
            conn.info[_PIPELINE] = raw(conn).pipeline()
            conn.info[_PIPELINE].__enter__()
        return raw(conn).execute(sql, parameters)


def fetch(cursor: "psycopg.Cursor[Any]", sql: str) -> list[Any]:
    """Return the rows of a statement that was sent."""
    with _translated(sql):
        return cursor.fetchall()


def deferred(conn: Connection) -> "dict[object, Deferred]":
    """Return the statements that a connection sends right before any other, which may be more by then."""
    found: dict[object, Deferred] = conn.info.setdefault(_DEFERRED, {})
    return found


def send_deferred(conn: Connection) -> None:
    """Send deferred statements. Raises as `send`."""
    for each in conn.info.pop(_DEFERRED, {}).values():
        each.send(conn)


def _commit(conn: Connection) -> None:
    """Commit, with deferred statements; where these fail, the server does not begin the commit."""
    if _PIPELINE in conn.info or _DEFERRED in conn.info:
        try:
            send(conn, "COMMIT")
        except BaseException:  # the same
            _abandon(conn)
            raise
        _leave(conn)
    else:
        execute(conn, "COMMIT")


def _leave(conn: Connection) -> None:
    """Send deferred statements and wait for the answers to all. Raises the first error."""
    send_deferred(conn)
    pipeline = conn.info.pop(_PIPELINE, None)
    if pipeline is not None:
        with _translated(None):
            pipeline.__exit__(None, None, None)


def _leave_before(conn: Connection, *_: Any) -> None:
    """Wait before SQLAlchemy's own execution, which reads answers at once."""
    _leave(conn)


def _abandon(conn: Connection) -> None:
    """Wait for the answers, and pass over errors: the statements will be undone."""
    if not conn.invalidated:  # else it would connect
        conn.info.pop(_DEFERRED, None)
        with suppress(Exception):
            _leave(conn)


@contextmanager
def _translated(sql: str | None) -> Iterator[None]:
    """Raise SQLAlchemy's errors for the driver's."""
    import psycopg

    try:
        yield
    except (psycopg.OperationalError, psycopg.InterfaceError) as error:
        raise OperationalError(sql, None, error) from error
    except psycopg.DataError as error:
        raise DataError(sql, None, error) from error
    except psycopg.ProgrammingError as error:  # as where there are no tables yet
        raise ProgrammingError(sql, None, error) from error


def _begin(conn: Connection, sql: str) -> "psycopg.Cursor[Any]":
    """Begin a transaction; on a new connection, if the server was away since the last one."""
    try:
        return execute(conn, sql)
    except OperationalError:
        if not conn.invalidated:
            if not raw(conn).closed:
                raise
            conn.invalidate()
        conn.rollback()  # SQLAlchemy's own idea of a transaction; then it connects by itself
        return execute(conn, sql)


@contextmanager
def _undone(conn: Connection) -> Iterator[None]:
    """Roll back where something is raised; a cut connection is an OperationalError."""
    try:
        yield
    except BaseException as error:
        _abandon(conn)
        with suppress(DBAPIError):
            conn.rollback()
        if conn.invalidated:
            if isinstance(error, DBAPIError) and not isinstance(error, OperationalError):
                raise OperationalError(error.statement, None, error) from error
            raise
        with suppress(Exception):  # the connection is cut, which the next one to use it will see
            raw(conn).rollback()
        raise
