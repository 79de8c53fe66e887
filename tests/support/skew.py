"""A database whose host has another time than this one."""

import pytest
from sqlalchemy import Connection

from skyrl_tinker.store.database.abstract_database import SKEW, Database


def skew(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """Have the clock of all databases that are opened from now on be so far ahead."""
    connect = Database.connect

    def skewed(database: Database) -> Connection:
        conn = connect(database)
        conn.info[SKEW] = seconds
        return conn

    patch.setattr(Database, "skew_s", seconds)
    patch.setattr(Database, "connect", skewed)
