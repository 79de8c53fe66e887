"""The database that a URL names."""

from pathlib import Path

from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError

from skyrl_tinker.errors import StartupError
from skyrl_tinker.store.database import postgresql, sqlite
from skyrl_tinker.store.database.abstract_database import Database, LeaseFence
from skyrl_tinker.store.database.postgresql import PostgresDatabase
from skyrl_tinker.store.database.sqlite_database import SqliteDatabase

_EXPECTED = f"expected {sqlite.DRIVER}:////absolute/path/to/file.db or {postgresql.DRIVER}://user:password@host/database"


def open_database(url: str, home: Path | None = None, fence: LeaseFence | None = None) -> Database:
    """Open a database, which need not exist yet if it is a file. Raises StartupError for another URL.

    `home`: base of relative paths in rows, by default the directory of a file. `fence`: guard that bars its
    writes, of PostgreSQL.
    """
    if (path := file_of(url)) is not None:
        return SqliteDatabase(str(path), home)
    return PostgresDatabase(make_url(url), home, fence)


def file_of(url: str) -> Path | None:
    """Return SQLite's file that a URL names, None for PostgreSQL. Raises StartupError for another URL."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):  # ValueError: the port is no number
        raise StartupError(f"database_url cannot be used: {_EXPECTED}") from None
    if parsed.drivername == postgresql.DRIVER and parsed.database:
        return None
    if parsed.drivername == sqlite.DRIVER and parsed.database and parsed.database != ":memory:":
        return Path(parsed.database)
    raise StartupError(f"database_url {parsed.render_as_string()!r} cannot be used: {_EXPECTED}")
