"""Row type, page size and insertion of a row, for every module of queries."""

from typing import Any

from sqlalchemy import Connection, Insert, Row

AnyRow = Row[*tuple[Any, ...]]
PAGE = 1000
"""Rows that one query of a long list reads."""


def insert_id(conn: Connection, row: Insert, values: dict[str, Any]) -> int:
    """Insert one row and return its integer primary key."""
    primary_key = conn.execute(row, values).inserted_primary_key
    assert primary_key is not None
    return int(primary_key[0])
