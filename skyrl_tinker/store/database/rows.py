"""Row type, page size, insertion and times of rows, for every module of queries."""

import time
from dataclasses import fields
from typing import Any, TypeVar

from sqlalchemy import BigInteger, Connection, Insert, Row, cast, func
from sqlalchemy.dialects import postgresql, sqlite

from skyrl_tinker.store.database.abstract_database import SKEW

AnyRow = Row[*tuple[Any, ...]]
T = TypeVar("T")
PAGE = 1000
"""Rows that one query of a long list reads."""


def database_time(conn: Connection) -> float:
    """Return the seconds since the epoch by the clock of the database's host, which all processes ask.

    Times in rows are of it, as the clocks of several hosts differ; processes with a file are on one. Only
    `started_at` and `since` of the server's state are of the host that writes them: compared with no row.
    """
    return time.time() + float(conn.info.get(SKEW, 0.0))


def as_row(kind: type[T], row: AnyRow, /, **others: Any) -> T:
    """Return a dataclass made of the columns that bear the names of its fields, but for `others`."""
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return kind(
        **{name: value for name, value in zip(row._fields, row, strict=True) if name in names} | others
    )


def values_of(row: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name, for a message or a dataclass that has them, too."""
    return {field.name: getattr(row, field.name) for field in fields(row)}


def insert_id(conn: Connection, row: Insert, values: dict[str, Any]) -> int:
    """Insert one row and return its integer primary key."""
    primary_key = conn.execute(row, values).inserted_primary_key
    assert primary_key is not None
    return int(primary_key[0])


def upsert(conn: Connection, table: Any) -> Any:
    """Return an INSERT that has `on_conflict_do_update`, which both databases have and SQL has not."""
    return postgresql.insert(table) if conn.dialect.name == "postgresql" else sqlite.insert(table)


def total(column: Any) -> Any:
    """Return SQL: the sum of an integer column as an integer, which PostgreSQL makes a decimal number."""
    return cast(func.sum(column), BigInteger)
