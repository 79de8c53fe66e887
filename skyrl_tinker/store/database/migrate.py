"""Bring a database to the newest schema."""

from contextlib import suppress
from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Engine, create_engine, event

from skyrl_tinker.bundled import bundled
from skyrl_tinker.store.database import sqlite

SCRIPTS = bundled("alembic")


def migrate(url: str) -> None:
    """Create the database if there is none and upgrade it to head. Synchronous; for no running loop.

    Raises StartupError for a URL that is not served yet.
    """
    path = sqlite.database(url)
    _private(Path(path))
    engine = create_engine("sqlite://", creator=lambda: sqlite.connect(path))
    event.listen(engine, "begin", sqlite.starts_with(sqlite.BEGIN_WRITE))
    try:
        upgrade(engine)
    finally:
        engine.dispose()


def _private(path: Path) -> None:
    """It holds the secrets that sign tokens and URLs. SQLite gives the files beside it the same mode."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    with suppress(PermissionError):  # who shares it with its owner was given leave
        path.chmod(0o600)


def upgrade(engine: Engine) -> None:
    """All of it happens or none: SQLite's DDL is transactional once the driver leaves it alone."""
    config = Config()
    config.set_main_option("script_location", str(SCRIPTS).replace("%", "%%"))
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
