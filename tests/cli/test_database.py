"""`skyrl-tinker db`: backups and moved directories, without a server; tests/faults has one that runs."""

import sqlite3
from pathlib import Path

import pytest
from click.testing import Result
from sqlalchemy import Connection
from typer.testing import CliRunner

from skyrl_tinker import config
from skyrl_tinker.cli.commands import app
from skyrl_tinker.config import Settings
from skyrl_tinker.directories import Directories
from skyrl_tinker.domain.ids import CheckpointKind, ModelState
from skyrl_tinker.domain.values import LoraSpec
from skyrl_tinker.store import checkpoint_records, model_records, session_records
from skyrl_tinker.store.checkpoint_records import NewCheckpoint
from skyrl_tinker.store.database.migrate import migrate
from skyrl_tinker.store.model_records import DEFAULT_OPTIMIZER, NewModel
from skyrl_tinker.store.store import write_once
from skyrl_tinker.system.process_lock import process_lock

WEIGHTS = CheckpointKind.WEIGHTS


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    made = config.load(home=tmp_path / "home")
    Directories(made).make()
    migrate(made.store_url, made.root)
    return made


def db(settings: Settings, *arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["db", *map(str, arguments), "--home", str(settings.home)])


def fail(settings: Settings, *arguments: str | Path) -> str:
    """Its one line."""
    result = db(settings, *arguments)
    assert (result.exit_code, len(result.stderr.splitlines())) == (1, 1), result.output
    return result.stderr


def test_a_home_that_a_migration_makes_is_told_as_new(tmp_path: Path) -> None:
    settings = config.load(home=tmp_path / "elsewhere")
    made = settings.root / "skyrl-tinker.db"
    told = f"skyrl-tinker: made {made}: this home is new, no server has run with it\n"
    assert [db(settings, "migrate").stderr for _ in range(2)] == [told, ""]


def add_checkpoint(settings: Settings, directory: Path) -> None:
    def add(conn: Connection) -> None:
        session = session_records.create(conn, owner=None, sdk_version="")
        spec = LoraSpec(4, 0)
        model = NewModel(session, 0, "tiny", spec, DEFAULT_OPTIMIZER, {})
        key = model_records.add(conn, model, ModelState.READY, None)
        new = NewCheckpoint(key, WEIGHTS, "a", str(directory), "tiny", spec, 1)
        checkpoint_records.add(conn, new, replace=False)

    write_once(settings.store_url, add, settings.root)


def stored(settings: Settings) -> list[str]:
    connection = sqlite3.connect(settings.root / "skyrl-tinker.db")
    paths = [path for (path,) in connection.execute("SELECT directory FROM checkpoints")]
    connection.close()
    return paths


def test_a_backup_says_what_is_not_in_it(settings: Settings, tmp_path: Path) -> None:
    result = db(settings, "backup", tmp_path / "copy.db", "--checkpoints", "/disk")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"{tmp_path / 'copy.db'}: 0.")
    assert "checkpoints (/disk)" in result.stderr
    assert f"snapshots of models in training ({settings.root / 'snapshots'})" in result.stderr
    assert (tmp_path / "copy.db").stat().st_size > 0
    assert "exists: name a file that does not" in fail(settings, "backup", tmp_path / "copy.db")


@pytest.mark.parametrize("command", [["backup", "copy.db"], ["relocate", "/a", "/tmp"]])
def test_where_no_server_has_run_there_is_nothing_to_do(tmp_path: Path, command: list[str]) -> None:
    settings = config.load(home=tmp_path / "none")
    assert "no server has run there" in fail(settings, *command)
    assert not settings.home.exists()


def test_checkpoints_that_were_moved_are_found(settings: Settings, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    add_checkpoint(settings, old / "1" / "a")
    add_checkpoint(settings, settings.root / "checkpoints" / "2" / "a")
    new.mkdir()
    result = db(settings, "relocate", old, new)
    assert result.stdout == f"paths from below {old} that now begin with {new}: 1\n"
    assert stored(settings) == [str(new / "1" / "a"), "checkpoints/2/a"]


def test_a_mistyped_directory_changes_nothing(settings: Settings, tmp_path: Path) -> None:
    add_checkpoint(settings, Path("/old/a"))
    assert "expected a directory that exists" in fail(settings, "relocate", "/old", tmp_path / "absent")
    assert "nothing is recorded below OLD (/ol)" in fail(settings, "relocate", "/ol", tmp_path)
    assert stored(settings) == ["/old/a"]


def test_directories_are_not_relocated_under_a_running_server(settings: Settings, tmp_path: Path) -> None:
    add_checkpoint(settings, Path("/old/a"))
    with process_lock(Directories(settings).server_lock, "server"):
        assert "another server (pid" in fail(settings, "relocate", "/old", tmp_path)
    assert stored(settings) == ["/old/a"]
