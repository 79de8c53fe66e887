"""Migration of a database to the newest schema."""

from contextlib import closing, suppress
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy import Connection, inspect
from sqlalchemy.exc import OperationalError, ProgrammingError

from skyrl_tinker import __version__
from skyrl_tinker.bundled import bundled
from skyrl_tinker.errors import StartupError
from skyrl_tinker.store.database.abstract_database import Database
from skyrl_tinker.store.database.opening import file_of, open_database

SCRIPTS = bundled("alembic")
_NOT_ALLOWED = (
    "42501"  # insufficient_privilege, https://www.postgresql.org/docs/current/errcodes-appendix.html
)


def migrate(url: str, home: Path | None = None) -> None:
    """Create the tables, and the file of SQLite, if there are none; upgrade them to head.

    `home`: of the server, by default the database's directory. Raises StartupError for a database that is not
    there, and for one of another kind.
    """
    if (file := file_of(url)) is not None:
        _private(file)
    with closing(open_database(url, home)) as database:
        upgrade(database)


def is_migrated(url: str) -> bool:
    """Return whether there are tables, of any version; the file of SQLite may be missing. StartupError."""
    if (file := file_of(url)) is not None and not file.exists():
        return False
    with closing(open_database(url)) as database, _connected(database) as connection:
        return bool(inspect(connection).has_table("alembic_version"))


def _private(path: Path) -> None:
    """Make the file private: it holds all users' work. SQLite gives the files beside it the same mode.

    StartupError for a directory.
    """
    if path.is_dir():
        raise StartupError(f"database_url: {path} is a directory, expected a file")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    with suppress(PermissionError):  # a file of another user, who has granted access
        path.chmod(0o600)


def upgrade(database: Database) -> None:
    """Upgrade in one transaction: the DDL of both databases is transactional. Raises StartupError."""
    config = Config()
    config.set_main_option("script_location", str(SCRIPTS).replace("%", "%%"))
    connection = _connected(database)
    # SQLAlchemy's transaction comes first: without one, alembic would commit each step by itself.
    try:
        with connection, connection.begin(), database.writing(connection):
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
    except CommandError as error:
        raise StartupError(
            f"the database is of another release than this one, {__version__} ({error}): serve it with that "
            "release or a newer one, or go on from a backup"
        ) from error
    except ProgrammingError as error:
        if getattr(error.orig, "sqlstate", None) != _NOT_ALLOWED:
            raise
        reason = str(error.orig).partition("\n")[0]
        raise StartupError(f"database_url: the role may not make tables: {reason}") from error


def _connected(database: Database) -> Connection:
    try:
        return database.connect()
    except (OperationalError, ProgrammingError) as error:  # the latter of an option that there is not
        raise StartupError(f"database_url: cannot connect: {error.orig}") from error
