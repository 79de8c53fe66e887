"""`skyrl-tinker db`: the server's database: its schema, backups, and the paths in it."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from sqlalchemy import make_url

from skyrl_tinker.cli.options import path, with_settings
from skyrl_tinker.cli.terminal import tell
from skyrl_tinker.config import Settings
from skyrl_tinker.errors import StartupError, UserError

app = typer.Typer(
    no_args_is_help=True, help="Back up and upgrade the database, move its files.", rich_markup_mode=None
)


@app.command()
@with_settings("home", "database_url")
def migrate(settings: Settings) -> None:
    """Bring the database to the newest schema; `serve` does this on its own."""
    from skyrl_tinker.directories import Directories
    from skyrl_tinker.store.database.migrate import migrate as upgrade

    with told_if_new(settings):
        Directories(settings).make()
        upgrade(settings.store_url, settings.root)
        print(f"up to date: {make_url(settings.store_url)}")  # without its password


@app.command()
@with_settings("home", "database_url", "checkpoints")
def backup(
    settings: Settings,
    file: Annotated[
        Path, typer.Argument(help="A file that does not exist yet, in a directory that does", parser=path)
    ],
) -> None:
    """Copy the database to FILE, also while the server runs.

    All that was acknowledged before is in FILE, which appears complete or not at all. Checkpoints and
    snapshots of models are directories of their own: copy them after it.
    """
    from skyrl_tinker.directories import Directories
    from skyrl_tinker.store.database.backup import back_up

    url = existing_database(settings)
    size = back_up(url, file)
    directories = Directories(settings)
    print(f"{file}: {size / 2**20:.1f} MB")
    print(
        f"not in it: checkpoints ({directories.checkpoint_root}) and the snapshots of models in training "
        f"({directories.snapshot_dir})",
        file=sys.stderr,
    )


@app.command()
@with_settings("home", "database_url")
def relocate(
    settings: Settings,
    old: Annotated[Path, typer.Argument(help="The directory as it was called", parser=path)],
    new: Annotated[Path, typer.Argument(help="The same directory as it is called now", parser=path)],
) -> None:
    """Let checkpoints below OLD be found below NEW, where you moved them; the server must not run.

    A home that was moved as a whole needs none of this: paths below it are recorded relative to it. For
    example, for a server with `--checkpoints /disk/checkpoints`:

    \b
      mv /disk/checkpoints /large/checkpoints
      skyrl-tinker db relocate /disk/checkpoints /large/checkpoints
      skyrl-tinker serve --checkpoints /large/checkpoints
    """
    if not new.is_dir():
        raise UserError(f"NEW is {new}, expected a directory that exists: move the files first")
    changed = _relocate(settings, old.absolute(), new.absolute())
    if not changed:
        raise UserError(f"nothing is recorded below OLD ({old.absolute()})")
    print(f"paths from below {old.absolute()} that now begin with {new.absolute()}: {changed}")


def _relocate(settings: Settings, old: Path, new: Path) -> int:
    """Rewrite the paths; returns how many. Raises StartupError while a server runs."""
    from skyrl_tinker.directories import Directories
    from skyrl_tinker.store.database import file_paths
    from skyrl_tinker.store.database.migrate import migrate as upgrade
    from skyrl_tinker.store.store import write_once
    from skyrl_tinker.system.process_lock import process_lock

    url = existing_database(settings)
    directories = Directories(settings)
    directories.make()
    with process_lock(directories.server_lock, "server"):
        upgrade(url, settings.root)
        return write_once(url, lambda conn: file_paths.relocate(conn, old, new), settings.root)


def existing_database(settings: Settings) -> str:
    """Return the URL of a database that exists. Raises StartupError when it does not."""
    if missing := _missing_file(settings):
        raise StartupError(f"no database {missing}: no server has run there")
    return settings.store_url


@contextmanager
def told_if_new(settings: Settings) -> Iterator[None]:
    """Say at the end that a command has made a home where there was no database: it may be the wrong one."""
    missing = _missing_file(settings)
    yield
    if missing:
        tell(f"made {missing}: this home is new, no server has run with it")


def _missing_file(settings: Settings) -> Path | None:
    """Return SQLite's file if it is not there yet."""
    from skyrl_tinker.store.database.opening import file_of

    file = file_of(settings.store_url)
    return None if file is None or file.exists() else file
