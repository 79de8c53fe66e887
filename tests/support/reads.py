"""Reads of tests."""

from collections.abc import Iterator
from contextlib import closing, contextmanager

from sqlalchemy import Connection

from skyrl_tinker.store.store import Store


@contextmanager
def reading(store: Store) -> Iterator[Connection]:
    """Lend a new connection that sees one state of the store's database."""
    database = store._database
    with closing(database.connect()) as conn, database.reading(conn):
        yield conn
