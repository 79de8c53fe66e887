"""Statements of the hot path: built and compiled by SQLAlchemy once, then executed by the driver itself.

SQLAlchemy's own execution takes three times as long in a busy process (54 us for one row of SQLite's, against
16) and twice as long in one that was idle (430 us against 230); a sample waits for five of these.
"""

from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, cast

from sqlalchemy import Connection, Dialect
from sqlalchemy.sql.dml import UpdateBase
from sqlalchemy.sql.selectable import Select

from skyrl_tinker.store.database import postgresql, sqlite
from skyrl_tinker.store.database.rows import AnyRow

Statement = Select[*tuple[Any, ...]] | UpdateBase
_Convert = Callable[[Any], Any]


class Prepared:
    """A statement whose parameters are `bindparam`s, none of them expanding.

    It runs in the transaction of a connection of `Store.read` or `Store.write`. Raises SQLAlchemy's
    OperationalError.
    """

    def __init__(self, statement: Statement, columns: Sequence[str] | None = None) -> None:
        """Prepare a statement; `columns` are the parameters of an INSERT that has no values."""
        self._statement = statement
        self._columns = columns
        self._compiled: dict[str, _Compiled] = {}  # by the dialect's name

    def rows(self, conn: Connection, parameters: Mapping[str, Any]) -> list[AnyRow]:
        """Return all rows; their fields have the columns' names, where those are valid names of fields."""
        return self._of(conn).rows(conn, parameters)

    def row(self, conn: Connection, parameters: Mapping[str, Any]) -> AnyRow | None:
        """Return the only row, None if there is none."""
        rows = self.rows(conn, parameters)
        return rows[0] if rows else None

    def send(self, conn: Connection, parameters: Mapping[str, Any]) -> "Sent":
        """Execute it, where the database is PostgreSQL without waiting for its answer.

        So that many are answered together; whatever runs next may raise an error of it.
        """
        return self._of(conn).send(conn, parameters)

    def change(self, conn: Connection, parameters: Mapping[str, Any]) -> int:
        """Execute a statement without rows and return how many rows it changed."""
        changed: int = self._of(conn).execute(conn, parameters).rowcount
        return changed

    def _of(self, conn: Connection) -> "_Compiled":
        dialect = conn.dialect
        compiled = self._compiled.get(dialect.name)
        if compiled is None:
            compiled = self._compiled[dialect.name] = _Compiled(self._statement, self._columns, dialect)
        return compiled


class Sent:
    """Statement on its way, whose rows can be read once, within its transaction."""

    __slots__ = ("_fetch",)

    def __init__(self, fetch: Callable[[], list[AnyRow]]) -> None:
        self._fetch = fetch

    def row(self) -> AnyRow | None:
        """Return the only row, None if there is none."""
        rows = self._fetch()
        return rows[0] if rows else None


class _Compiled:
    """Statement in one dialect, with the conversions of its parameters and columns."""

    def __init__(self, statement: Statement, columns: Sequence[str] | None, dialect: Dialect) -> None:
        compiled = statement.compile(dialect=dialect, column_keys=columns)
        self._sql = str(compiled)
        self._constants: dict[str, Any] = {}
        self._encode: list[tuple[str, _Convert]] = []
        for name, bind in compiled.binds.items():
            encode = bind.type.bind_processor(dialect)
            if not bind.required:
                self._constants[name] = encode(bind.value) if encode else bind.value
            elif encode:
                self._encode.append((name, encode))
        self._run: Callable[..., Any] = postgresql.execute
        self._in_order: _Convert = dict  # PostgreSQL's driver takes parameters by name
        self._positional = compiled.positional
        if compiled.positional:
            names = cast(list[str], compiled.positiontup)
            pick = itemgetter(*names)
            self._run = sqlite.execute
            self._in_order = pick if len(names) > 1 else lambda values: (pick(values),)
        columns_out = list(statement.exported_columns)
        self._row = _row_class([str(column.key) for column in columns_out])
        decoders = [column.type.result_processor(dialect, None) for column in columns_out]
        self._decode = [(index, decode) for index, decode in enumerate(decoders) if decode]

    def rows(self, conn: Connection, parameters: Mapping[str, Any]) -> list[AnyRow]:
        return [self._decoded(row) for row in self.execute(conn, parameters).fetchall()]

    def execute(self, conn: Connection, parameters: Mapping[str, Any]) -> Any:
        """Execute it in the driver, whose cursor it returns."""
        return self._run(conn, self._sql, self._encoded(parameters))

    def send(self, conn: Connection, parameters: Mapping[str, Any]) -> Sent:
        if self._positional:
            rows = self.rows(conn, parameters)
            return Sent(lambda: rows)
        cursor = postgresql.send(conn, self._sql, self._encoded(parameters))
        return Sent(lambda: [self._decoded(row) for row in postgresql.fetch(cursor, self._sql)])

    def _encoded(self, parameters: Mapping[str, Any]) -> Any:
        values = {**self._constants, **parameters}
        for name, encode in self._encode:
            values[name] = encode(values[name])
        return self._in_order(values)

    def _decoded(self, row: Sequence[Any]) -> AnyRow:
        values = list(row)
        for index, decode in self._decode:
            values[index] = decode(values[index])
        decoded: AnyRow = self._row._make(values)
        return decoded


def _row_class(names: Sequence[str]) -> Any:
    return namedtuple("Row", names, rename=True)
