"""alembic's history and the tables are the same schema."""

import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, create_engine

import skyrl_tinker
from skyrl_tinker.errors import StartupError
from skyrl_tinker.store import migrate
from skyrl_tinker.store.tables import Base

ROOT = Path(skyrl_tinker.__file__).parents[1]


def schema(path: Path) -> dict[str, str]:
    """Name → DDL of every table and index. Parts are sorted: the order of columns has no meaning, and one
    that a migration added stands on the line of another."""
    connection = sqlite3.connect(path)
    rows = connection.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
    connection.close()
    return {name: "\n".join(sorted(re.split(r"\s*\n\s*|,\s+", sql))) for name, sql in rows}


def connected(path: Path) -> Connection:
    return create_engine(f"sqlite:///{path}").connect()


def test_the_migrated_schema_is_that_of_the_tables(url: str, tmp_path: Path) -> None:
    with connected(tmp_path / "store.db") as connection:
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []
        connection.engine.dispose()


def test_constraints_and_autoincrement_are_those_of_the_tables(url: str, tmp_path: Path) -> None:
    with connected(tmp_path / "tables.db") as connection, connection.begin():
        Base.metadata.create_all(connection)
    connection.engine.dispose()
    migrated = schema(tmp_path / "store.db")
    del migrated["alembic_version"]
    assert migrated == schema(tmp_path / "tables.db")


def test_migrating_again_changes_nothing(url: str, tmp_path: Path) -> None:
    before = schema(tmp_path / "store.db")
    migrate(url)
    assert schema(tmp_path / "store.db") == before


def test_the_directory_of_the_database_is_made(tmp_path: Path) -> None:
    path = tmp_path / "50% of" / "home" / "store.db"
    migrate(f"sqlite+aiosqlite:///{path}")
    assert "futures" in schema(path)


def test_a_failed_migration_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "store.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE snapshots (x)")  # in the way of the last step
    connection.close()
    with pytest.raises(Exception, match="table snapshots already exists"):
        migrate(f"sqlite+aiosqlite:///{path}")
    assert set(schema(path)) == {"snapshots"}


def test_other_databases_are_refused() -> None:
    with pytest.raises(StartupError, match="only SQLite files"):
        migrate("postgresql+asyncpg://h/d")


@pytest.mark.parametrize("how", [["-c", "import alembic.command"], ["-m", "alembic", "--version"]])
def test_our_alembic_directory_does_not_hide_the_package(how: list[str]) -> None:
    subprocess.run([sys.executable, *how], cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, check=True)
