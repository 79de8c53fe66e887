"""Backup of a database that a server may have open: one state of it, complete or not at all."""

import os
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

from skyrl_tinker.errors import StorageError, UserError
from skyrl_tinker.store.database import sqlite
from skyrl_tinker.store.database.opening import file_of
from skyrl_tinker.system.atomic_directory import fsync, storage_errors


def back_up(url: str, file: Path) -> int:
    """Copy an existing database to `file`; returns the size in bytes. Writers do not wait meanwhile.

    All that was committed before the call is in the copy: a file without a write-ahead log, which only this
    user can read. Raises UserError if `file` exists or the database is no file, StorageError if the copy
    cannot be written or the database is damaged.
    """
    source = file_of(url)
    if source is None:
        raise UserError("the database is PostgreSQL's: back it up by pg_dump or its own tools")
    _require_new(file)
    prefix = f".{file.name}."
    with (
        storage_errors(f"no backup {file} was made"),
        tempfile.TemporaryDirectory(prefix=prefix, suffix=".partial", dir=file.parent) as staging,
    ):
        copy = Path(staging) / file.name
        try:
            _copy(str(source), copy)
        except sqlite3.Error as error:
            raise StorageError(f"no backup {file} was made: {error}") from error
        copy.chmod(0o600)  # it holds the work of all users
        fsync(copy)
        _require_new(file)
        copy.rename(file)
        fsync(file.absolute().parent)
    return os.stat(file).st_size


def _copy(database: str, copy: Path) -> None:
    """Copy in one read transaction, then check the copy. Raises sqlite3.Error, also if it is damaged."""
    with closing(sqlite.connect(database)) as source, closing(sqlite3.connect(copy)) as target:
        source.backup(target)
        target.execute("PRAGMA journal_mode = DELETE")
        (verdict, *_) = target.execute("PRAGMA quick_check").fetchone()
        if verdict != "ok":
            raise sqlite3.DatabaseError(f"{database} is damaged: {verdict}")


def _require_new(file: Path) -> None:
    if os.path.lexists(file):
        raise UserError(f"{file} exists: name a file that does not")
