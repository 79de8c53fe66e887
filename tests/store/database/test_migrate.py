"""alembic's history and the tables are the same schema."""

import re
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from sqlalchemy import Connection, create_engine, inspect, make_url

import skyrl_tinker
from skyrl_tinker.errors import StartupError
from skyrl_tinker.store import api_keys
from skyrl_tinker.store.database.migrate import SCRIPTS, migrate
from skyrl_tinker.store.database.opening import open_database
from skyrl_tinker.store.database.sqlite_database import SqliteDatabase
from skyrl_tinker.store.database.tables import Base
from tests.store.support.databases import on_postgresql, on_sqlite
from tests.support.postgres import Postgres

ROWS_OF_0004 = """
    INSERT INTO sessions VALUES ('s', 1, 1, NULL, NULL, NULL, '[]', '{}', NULL, NULL, '0.38.0');
    INSERT INTO models VALUES
        (1, 's:train:0', 's', 0, 'tiny', 8, 0, 1, 1, 1, '{}', '{}', 'ready', NULL, 1, 1);
    INSERT INTO adapter_versions (id, model_key, kind, directory, durable, created_at)
        VALUES (1, 1, 'lora', '/a', 1, 1);
    INSERT INTO sampling_sessions VALUES ('s:sample:0', 's', 0, 'tiny', NULL, 1, 1);
    INSERT INTO futures (id, request_id, kind, session_id, sampling_session_id, seq_id, digest, sequence_ids,
        status, created_at, finished_at)
        VALUES (1, 'r', 'sample', 's', 's:sample:0', 0, x'00', '[]', 'done', 1, 2);
    INSERT INTO results VALUES (1, 1, 't', x'00');
    INSERT INTO checkpoints (model_key, kind, name, directory, version_id, base_model, lora_rank, seed,
        train_mlp, train_attn, train_unembed, has_optimizer, optimizer_config, size_bytes, user_metadata,
        created_at) VALUES (1, 'sampler_weights', 'a', '/a', 1, 'tiny', 8, 0, 1, 1, 1, 0, '{}', 1, '{}', 1);
"""
ROWS_OF_0006 = """
    INSERT INTO sessions VALUES ('s', 1, 1, NULL, NULL, NULL, '[]', '{}', NULL, NULL, '0.38.0', NULL);
    INSERT INTO models VALUES
        (1, 's:train:0', 's', 0, 'tiny', 8, 0, 1, 1, 1, '{}', '{}', 'ready', NULL, 1, 1),
        (2, 's:train:1', 's', 1, 'tiny', 8, 0, 1, 1, 1, '{}', '{}', 'creating', NULL, 1, 1);
    INSERT INTO adapter_versions (id, model_key, kind, directory, durable, created_at)
        VALUES (1, 1, 'lora', '/a', 1, 1);
    INSERT INTO futures (id, request_id, kind, session_id, model_key, seq_id, digest, sequence_ids, status,
        created_at, finished_at)
        VALUES (1, 'r', 'create_model', 's', 1, 0, x'00', '[]', 'done', 1, 2),
               (2, 'q', 'optim_step', 's', 1, 1, x'00', '[]', 'pending', 1, NULL);
    INSERT INTO requests VALUES (2, x'78');
    INSERT INTO snapshots (model_key, seq_id, directory, created_at) VALUES (1, 0, '/s', 1);
"""
ROWS_OF_0008 = """
    INSERT INTO sessions VALUES ('s', 1, 1, NULL, NULL, NULL, '[]', '{}', NULL, NULL, '0.38.0', NULL);
    INSERT INTO models VALUES
        (1, 's:train:0', 's', 0, 'tiny', 8, 0, 1, 1, 1, '{}', '{}', 'ready', NULL, 1, 1);
    INSERT INTO adapter_versions (id, model_key, kind, durable, created_at)
        VALUES (1, 1, 'lora', 0, 1), (2, 1, 'lora', 0, 1), (3, 1, 'lora', 0, 1);
    INSERT INTO checkpoints (id, model_key, kind, name, directory, base_model, lora_rank, seed, train_mlp,
        train_attn, train_unembed, has_optimizer, optimizer_config, size_bytes, user_metadata, created_at)
        VALUES (1, 1, 'weights', 'a', '', 'tiny', 8, 0, 1, 1, 1, 0, '{}', 1, '{}', 1),
               (2, 1, 'weights', 'b', '', 'tiny', 8, 0, 1, 1, 1, 0, '{}', 1, '{}', 1),
               (3, 1, 'weights', 'c', '', 'tiny', 8, 0, 1, 1, 1, 0, '{}', 1, '{}', 1);
    INSERT INTO snapshots (id, model_key, seq_id, directory, created_at) VALUES (1, 1, 4, '', 1);
"""
ROWS_OF_0010 = """
    INSERT INTO api_keys VALUES (1, 'alice', x'01', 1, NULL), (2, 'bob', x'02', 1, 2);
    INSERT INTO server_state VALUES ('secret.jwt', '"a"'), ('secret.download', '"b"'), ('engine', '{}');
    INSERT INTO sessions VALUES ('s', 1, 1, NULL, NULL, NULL, '[]', '{}', NULL, NULL, '0.38.0', 1);
"""
ROWS_OF_0018 = """
    INSERT INTO sessions (session_id, created_at, last_heartbeat_at, tags, user_metadata, sdk_version)
        VALUES ('s', 1, 1, '[]', '{}', '0.38.0');
    INSERT INTO models (key, model_id, session_id, model_seq_id, base_model, lora_rank, seed, train_mlp,
        train_attn, train_unembed, optimizer_config, user_metadata, state, created_at, last_request_at,
        steps_before)
        VALUES (1, 's:train:0', 's', 0, 'tiny', 8, 0, 1, 1, 1, '{}', '{}', 'ready', 1, 1, 5),
               (2, 's:train:1', 's', 1, 'tiny', 8, 0, 1, 1, 1, '{}', '{}', 'ready', 1, 1, 0);
    INSERT INTO step_points (model_key, step, seq_id, at, tokens, datums, wait_s, compute_s, answer_s)
        VALUES (1, 1, 2, 10, 1, 1, 0, 0, 0), (1, 2, 4, 20, 1, 1, 0, 0, 0), (1, 3, 7, 30, 1, 1, 0, 0, 0);
    INSERT INTO checkpoints (model_key, kind, name, directory, base_model, lora_rank, seed, train_mlp,
        train_attn, train_unembed, has_optimizer, optimizer_config, size_bytes, user_metadata, created_at)
        VALUES (1, 'weights', 'a', '', 'tiny', 8, 0, 1, 1, 1, 0, '{}', 1, '{}', 25),
               (1, 'weights', 'b', '', 'tiny', 8, 0, 1, 1, 1, 0, '{}', 1, '{}', 5),
               (2, 'weights', 'c', '', 'tiny', 8, 0, 1, 1, 1, 0, '{}', 1, '{}', 25);
"""
ROWS_OF_0019 = f"""
    {ROWS_OF_0018}
    INSERT INTO futures (id, request_id, kind, session_id, model_key, seq_id, digest, sequence_ids, status,
        created_at) VALUES (1, 'r', 'save_weights_for_sampler', 's', 1, 5, x'00', '[]', 'done', 1);
    INSERT INTO adapter_versions (id, model_key, kind, directory, durable, created_at, future_id)
        VALUES (1, 1, 'lora', 'a', 1, 40, 1), (2, 2, 'lora', 'c', 1, 40, 7), (3, 1, 'lora', 'd', 0, 40, 8),
               (4, 1, 'lora', NULL, 0, 40, 1);
    UPDATE checkpoints SET steps = 3, version_id = 2 WHERE name = 'c';
"""
PATHS_OF_0008 = [
    ("adapter_versions", 1, "HOME/run/adapters/v1"),
    ("adapter_versions", 2, "/dev/shm/v2"),
    ("adapter_versions", 3, None),
    ("checkpoints", 1, "HOME/checkpoints/1/weights/a"),
    ("checkpoints", 2, "/disk/b"),
    ("checkpoints", 3, "HOME-2/c"),
    ("snapshots", 1, "HOME/snapshots/1/4.ab"),
]
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


def test_the_migrated_schema_is_that_of_the_tables(url: str) -> None:
    with open_database(url).connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []


@on_postgresql
def test_postgresql_goes_down_and_up_again(url: str) -> None:
    """The text of its schema is that of its tables; SQLite's, which has one, is compared below."""
    database, config = open_database(url), Config()
    config.set_main_option("script_location", str(SCRIPTS))
    with database.connect() as connection, connection.begin(), database.writing(connection):
        config.attributes["connection"] = connection
        command.downgrade(config, "base")
        assert inspect(connection).get_table_names() == ["alembic_version"]
    migrate(url)
    migrate(url)
    with database.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []


@on_sqlite
def test_constraints_and_autoincrement_are_those_of_the_tables(url: str, tmp_path: Path) -> None:
    with connected(tmp_path / "tables.db") as connection, connection.begin():
        Base.metadata.create_all(connection)
    connection.engine.dispose()
    migrated = schema(tmp_path / "store.db")
    del migrated["alembic_version"]
    assert migrated == schema(tmp_path / "tables.db")


@on_sqlite
def test_migrating_again_changes_nothing(url: str, tmp_path: Path) -> None:
    before = schema(tmp_path / "store.db")
    migrate(url)
    assert schema(tmp_path / "store.db") == before


def test_the_directory_of_the_database_is_made(tmp_path: Path) -> None:
    path = tmp_path / "50% of" / "home" / "store.db"
    migrate(f"sqlite:///{path}")
    assert "futures" in schema(path)


@pytest.mark.parametrize("there", [False, True])
def test_nobody_else_on_the_machine_reads_the_database(tmp_path: Path, there: bool) -> None:
    path = tmp_path / "store.db"
    if there:
        path.touch(mode=0o644)
    migrate(f"sqlite:///{path}")
    with sqlite3.connect(path) as connection:
        connection.execute("INSERT INTO server_state VALUES ('secret.jwt', '1')")
        modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()}
    connection.close()
    assert "store.db-wal" in modes
    assert set(modes.values()) == {0o600}


def _update(path: Path, version: str, rows: str) -> None:
    """Make a database of an older version with these rows, and migrate it."""
    _upgrade(path, version)
    with sqlite3.connect(path) as connection:
        connection.executescript(rows)
    connection.close()
    _upgrade(path, "head")


def test_rows_of_the_version_before_stay_and_get_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    _update(path, "0004", ROWS_OF_0004)
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
    assert connection.execute("SELECT owner_id FROM sessions").fetchall() == [(None,)]
    assert connection.execute("SELECT clones FROM sampling_sessions").fetchall() == [(0,)]
    tokens = "SELECT input_tokens, cached_tokens, output_tokens FROM results"
    assert connection.execute(tokens).fetchall() == [(0, 0, 0)]
    assert connection.execute("SELECT public, removed_at FROM checkpoints").fetchall() == [(0, None)]
    connection.close()


def test_a_model_of_the_version_before_snapshots_is_lost_and_says_why(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    _update(path, "0006", ROWS_OF_0006)
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
    states = dict(
        connection.execute("SELECT model_id, state || coalesce(' ' || state_reason, '') FROM models")
    )
    assert states["s:train:0"].startswith("lost the server was updated")
    assert states["s:train:1"] == "creating"
    assert connection.execute("SELECT unit, effect, row_budget FROM futures").fetchall() == [(None,) * 3] * 2
    assert connection.execute("SELECT future_id FROM adapter_versions").fetchall() == [(None,)]
    assert connection.execute("SELECT * FROM requests").fetchall() == [(2, b"x")]
    connection.close()


def test_keys_of_the_version_before_stay_and_signing_secrets_leave_the_database(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    _update(path, "0010", ROWS_OF_0010)
    store = create_engine(f"sqlite:///{path}").connect()
    assert [
        (row.id, row.name, row.revoked_at, row.expires_at, row.last_used_at, row.admin, row.limits)
        for row in api_keys.list_keys(store)
    ] == [(1, "alice", None, None, None, False, None), (2, "bob", 2, None, None, False, None)]
    ends = {digest: secret.end for digest, secret in api_keys.secrets_by_digest(store).items()}
    assert ends == {b"\x01": None, b"\x02": "revoked"}
    store.close()
    store.engine.dispose()
    connection = sqlite3.connect(path)
    assert connection.execute("SELECT key FROM server_state").fetchall() == [("engine",)]
    assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
    connection.close()
    _downgrade(path, "0010")
    connection = sqlite3.connect(path)
    assert connection.execute("SELECT * FROM api_keys").fetchall() == [
        (1, "alice", b"\x01", 1, None),
        (2, "bob", b"\x02", 1, 2),
    ]
    connection.close()


def test_checkpoints_of_the_version_before_get_the_steps_until_they_were_recorded(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    _update(path, "0018", ROWS_OF_0018)
    connection = sqlite3.connect(path)
    assert connection.execute("SELECT name, steps FROM checkpoints").fetchall() == [
        ("a", 7),
        ("b", 5),
        ("c", 0),
    ]
    connection.close()


def test_versions_of_the_version_before_get_the_steps_of_their_save_or_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    _update(path, "0019", ROWS_OF_0019)
    connection = sqlite3.connect(path)
    steps = dict(connection.execute("SELECT id, steps FROM adapter_versions"))
    assert steps == {1: 7, 2: 3, 3: None, 4: None}
    connection.close()


def test_paths_below_the_home_become_relative_to_it(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    _upgrade(path, "0008")
    home = str(tmp_path)
    with sqlite3.connect(path) as connection:
        connection.executescript(ROWS_OF_0008)
        for table, row_id, directory in PATHS_OF_0008:
            moved = directory and directory.replace("HOME", home)
            connection.execute(f"UPDATE {table} SET directory = ? WHERE id = ?", (moved, row_id))
    connection.close()

    def paths() -> list[str | None]:
        connection = sqlite3.connect(path)
        found = [
            connection.execute(f"SELECT directory FROM {table} WHERE id = ?", (row_id,)).fetchone()[0]
            for table, row_id, _ in PATHS_OF_0008
        ]
        connection.close()
        return found

    before = paths()
    _upgrade(path, "head")
    assert paths() == [
        "run/adapters/v1",
        "/dev/shm/v2",
        None,
        "checkpoints/1/weights/a",
        "/disk/b",
        f"{home}-2/c",
        "snapshots/1/4.ab",
    ]
    _downgrade(path, "0008")
    assert paths() == before


def _upgrade(path: Path, revision: str, change: Callable[[Config, str], None] = command.upgrade) -> None:
    config = Config()
    config.set_main_option("script_location", str(SCRIPTS))
    database = SqliteDatabase(str(path))
    with database.connect() as connection, connection.begin(), database.writing(connection):
        config.attributes["connection"] = connection
        change(config, revision)


def _downgrade(path: Path, revision: str) -> None:
    _upgrade(path, revision, command.downgrade)


def test_a_failed_migration_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "store.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE snapshots (x)")  # in the way of the last step
    connection.close()
    with pytest.raises(Exception, match="table snapshots already exists"):
        migrate(f"sqlite:///{path}")
    assert set(schema(path)) == {"snapshots"}


def test_a_role_that_may_not_make_tables_is_told_so(postgres: Postgres) -> None:
    url = make_url(postgres.new_database(template="template1"))
    postgres.execute("CREATE ROLE guest LOGIN PASSWORD 'secret'")
    administrator = url.set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(administrator, autocommit=True) as conn:
        conn.execute("REVOKE CREATE ON SCHEMA public FROM PUBLIC")  # as it is from PostgreSQL 15
    with pytest.raises(StartupError, match=r"^database_url: the role may not make tables: permission denied"):
        migrate(url.set(username="guest").render_as_string(hide_password=False))


def test_other_databases_are_refused() -> None:
    with pytest.raises(StartupError, match="cannot be used: expected sqlite"):
        migrate("postgresql+asyncpg://h/d")


@pytest.mark.parametrize("how", [["-c", "import alembic.command"], ["-m", "alembic", "--version"]])
def test_our_alembic_directory_does_not_hide_the_package(how: list[str]) -> None:
    subprocess.run([sys.executable, *how], cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, check=True)


def test_an_option_that_the_driver_does_not_know_is_told() -> None:
    with pytest.raises(StartupError, match="database_url: cannot connect: invalid connection option"):
        migrate("postgresql+psycopg://u@127.0.0.1:9/n?no_such_option=1")
