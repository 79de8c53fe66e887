"""Statements of the hot path: built and compiled by SQLAlchemy once, then executed by the driver itself.

SQLAlchemy's own execution takes three times as long in a busy process (54 us for one row of SQLite's, against
16) and twice as long in one that was idle (430 us against 230); a sample waits for five of these.
"""

from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, TypeGuard, cast

from sqlalchemy import JSON, Connection, Dialect, bindparam, func, insert, literal_column, select, true
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.dialects.postgresql import insert as postgresql_insert
from sqlalchemy.sql.dml import UpdateBase
from sqlalchemy.sql.elements import BindParameter
from sqlalchemy.sql.selectable import Select, TableValuedAlias
from sqlalchemy.sql.type_api import TypeEngine
from sqlalchemy.sql.visitors import iterate, replacement_traverse

from skyrl_tinker.store.database import postgresql, sqlite
from skyrl_tinker.store.database.rows import AnyRow
from skyrl_tinker.store.database.tables import Base

Statement = Select[*tuple[Any, ...]] | UpdateBase
_Convert = Callable[[Any], Any]
_PLACE = "place"
"""Column of the order in which ops have sent."""


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


class Gathered:
    """INSERT of the row that a SELECT finds for an op, which many ops send, each with parameters of its own.

    PostgreSQL executes it once for all of them, when the first asks for its row or something else is sent: no
    op's row is there for the others' SELECT.
    """

    def __init__(
        self,
        table: type[Base],
        columns: Sequence[str],
        found: Select[*tuple[Any, ...]],
        key: str | None = None,
    ) -> None:
        """`key`: the column and parameter by which ops know their rows, or else do not ask for them.

        A row has that and the primary key. Of those that break one unique constraint only the first is there.
        """
        returned = [table.__table__.c[key], *table.__table__.primary_key] if key else []
        self._key = key
        self._one = Prepared(insert(table).from_select(columns, found).returning(*returned))
        given = _given(found)
        row = _of_given(found).limit(literal_column("1")).lateral("found")  # it stays a look-up for each
        rows = select(row).select_from(given.join(row, true())).order_by(literal_column(f"given.{_PLACE}"))
        of_all = postgresql_insert(table).from_select(columns, rows)
        self._of_all = Prepared((of_all.on_conflict_do_nothing() if key else of_all).returning(*returned))

    def send(self, conn: Connection, parameters: Mapping[str, Any]) -> "Sent":
        """Have it executed for these parameters; whatever runs next may raise an error of it.

        Other statements of an op come behind it.
        """
        if conn.dialect.name != "postgresql":
            return self._one.send(conn, parameters)
        together = postgresql.deferred(conn).setdefault(self, _Together(self._one, self._of_all))
        assert isinstance(together, _Together)
        together.given.append(parameters)
        key = self._key
        return Sent(lambda: together.rows_of(conn, key, parameters) if key else [])


class _Together:
    """Executions of a Gathered that are sent as one."""

    def __init__(self, one: Prepared, of_all: Prepared) -> None:
        self.given: list[Mapping[str, Any]] = []
        self._one = one
        self._of_all = of_all
        self._sent: Sent | None = None
        self._by_key: dict[Any, list[AnyRow]] | None = None

    def send(self, conn: Connection) -> None:
        first, *others = self.given
        arrays = {name: [each[name] for each in self.given] for name in first}
        self._sent = self._of_all.send(conn, arrays) if others else self._one.send(conn, first)

    def rows_of(self, conn: Connection, key: str, parameters: Mapping[str, Any]) -> list[AnyRow]:
        """Return the row with the same `key` as these parameters, if there is one."""
        if self._by_key is None:
            postgresql.send_deferred(conn)
            assert self._sent is not None
            self._by_key = {getattr(row, key): [row] for row in self._sent.rows()}
        return self._by_key.get(parameters[key], [])


def _given(found: Select[*tuple[Any, ...]]) -> TableValuedAlias:
    """Return a table, `given`, of the parameters of a statement, each of which is an array."""
    types = {bind.key: bind.type for bind in iterate(found) if _is_parameter(bind)}
    arrays = [bindparam(name, type_=ARRAY(type_, dimensions=1)) for name, type_ in types.items()]
    table = func.unnest(*arrays).table_valued(*types, with_ordinality=_PLACE)
    return table.render_derived(name="given")


def _of_given(found: Select[*tuple[Any, ...]]) -> Select[*tuple[Any, ...]]:
    """Return the statement with the columns of `given` for its parameters."""

    def column(element: object, **_: Any) -> Any:
        if not _is_parameter(element):
            return None
        return literal_column(f"given.{element.key}", element.type).label(element.key)

    replaced: Select[*tuple[Any, ...]] = replacement_traverse(cast(Any, found), {}, column)
    return replaced


def _is_parameter(element: object) -> TypeGuard[BindParameter[Any]]:
    return isinstance(element, BindParameter) and element.required


class Sent:
    """Statement on its way, whose rows can be read once, within its transaction."""

    __slots__ = ("_fetch",)

    def __init__(self, fetch: Callable[[], list[AnyRow]]) -> None:
        self._fetch = fetch

    def rows(self) -> list[AnyRow]:
        return self._fetch()

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
            self._run = sqlite.execute
            few = len(names) < 2  # of which itemgetter makes no tuple
            self._in_order = (lambda values: tuple(map(values.get, names))) if few else itemgetter(*names)
        columns_out = list(statement.exported_columns)
        self._row: _Convert = _row_class([str(column.key) for column in columns_out])._make
        decoders = [_decoder(column.type, dialect) for column in columns_out]
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
        if self._decode:
            values = list(row)
            for index, decode in self._decode:
                values[index] = decode(values[index])
            row = values
        decoded: AnyRow = self._row(row)
        return decoded


def _decoder(of: TypeEngine[Any], dialect: Dialect) -> _Convert | None:
    """Return what makes a value of a driver's; of JSON, drivers make some themselves."""
    own = of.dialect_impl(dialect) if isinstance(of, JSON) else of
    return own.result_processor(dialect, None)


def _row_class(names: Sequence[str]) -> Any:
    return namedtuple("Row", names, rename=True)
