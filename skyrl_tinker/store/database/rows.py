"""Helpers for every module of queries."""

from typing import Any

from sqlalchemy import Insert, Row
from sqlalchemy.ext.asyncio import AsyncConnection

AnyRow = Row[*tuple[Any, ...]]
PAGE = 1000
"""Rows that one query of a long list reads."""


async def insert_id(conn: AsyncConnection, row: Insert, values: dict[str, Any]) -> int:
    """Insert one row, return the integer primary key it got."""
    primary_key = (await conn.execute(row, values)).inserted_primary_key
    assert primary_key is not None
    return int(primary_key[0])
