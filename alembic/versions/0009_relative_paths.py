"""Paths of checkpoints, weight versions and snapshots below the home are relative to it: it can be moved."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"

TABLES = "adapter_versions", "checkpoints", "snapshots"


def upgrade() -> None:
    prefix = _prefix()
    for directory in _columns():
        below = sa.func.substr(directory, 1, len(prefix)) == prefix
        _set(directory, sa.func.substr(directory, len(prefix) + 1), below)


def downgrade() -> None:
    for directory in _columns():
        _set(directory, sa.literal(_prefix()) + directory, ~directory.startswith("/"))


def _prefix() -> str:
    return f"{op.get_bind().get_execution_options()['home']}/"


def _columns() -> list[sa.Column[str]]:
    return [sa.table(name, sa.column("directory", sa.String())).c.directory for name in TABLES]


def _set(column: sa.Column[str], value: sa.ColumnElement[str], where: sa.ColumnElement[bool]) -> None:
    op.execute(sa.update(column.table).where(where).values(directory=value))
