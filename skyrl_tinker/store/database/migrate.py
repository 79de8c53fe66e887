"""Migration of a database to the newest schema."""

from contextlib import suppress
from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Engine, event

from skyrl_tinker.bundled import bundled
from skyrl_tinker.store.database import sqlite

SCRIPTS = bundled("alembic")


def migrate(url: str, home: Path | None = None) -> None:
    """Create the database if there is none and upgrade it to head.

    `home`: of the server, by default the database's directory. Raises StartupError for a URL that is not
    served yet.
    """
    path = sqlite.database(url)
    _private(Path(path))
    engine = sqlite.engine(path, home)
    event.listen(engine, "begin", sqlite.starts_with(sqlite.BEGIN_WRITE))
    try:
        upgrade(engine)
    finally:
        engine.dispose()


def _private(path: Path) -> None:
    """Make the file private: it holds all users' work. SQLite gives the files beside it the same mode."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    with suppress(PermissionError):  # a file of another user, who has granted access
        path.chmod(0o600)


def upgrade(engine: Engine) -> None:
    """Upgrade to head in one transaction: SQLite's DDL is transactional without the driver's own commits."""
    config = Config()
    config.set_main_option("script_location", str(SCRIPTS).replace("%", "%%"))
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
