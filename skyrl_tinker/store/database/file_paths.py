"""Paths of directories in rows: below the server's home relative to it, so that the home can be moved.

Files elsewhere, as below a separate checkpoint root, have absolute paths.
"""

from pathlib import Path

from sqlalchemy import Connection, select, update

from skyrl_tinker.store.database.tables import AdapterVersion, SavedCheckpoint, Snapshot


def to_stored(conn: Connection, path: str | Path) -> str:
    """Return an absolute path as rows have it."""
    home = _home(conn)
    return str(Path(path).relative_to(home) if Path(path).is_relative_to(home) else path)


def from_stored(conn: Connection, stored: str) -> str:
    """Return the absolute path that a row has."""
    return str(_home(conn) / stored)


def relocate(conn: Connection, old: Path, new: Path) -> int:
    """Let every path at or below `old` begin with `new`. Returns how many changed."""
    moved = 0
    for table in (AdapterVersion, SavedCheckpoint, Snapshot):
        rows = conn.execute(select(table.id, table.directory).where(table.directory.is_not(None))).all()
        paths = {row.id: Path(from_stored(conn, row.directory)) for row in rows}
        for row_id, path in paths.items():
            if path.is_relative_to(old):
                stored = to_stored(conn, new / path.relative_to(old))
                conn.execute(update(table).where(table.id == row_id).values(directory=stored))
                moved += 1
    return moved


def _home(conn: Connection) -> Path:
    home: Path | None = conn.get_execution_options()["home"]
    assert home is not None, "a database that is no file was opened without its server's home"
    return home
