"""Weight versions have the size of their files; an index of the kept ones has all that sweeps look at."""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"

_TABLE, _KEPT, _DROPPED = "adapter_versions", "ix_adapter_versions_kept", "ix_adapter_versions_dropped_at"


def upgrade() -> None:
    op.add_column(_TABLE, sa.Column("size_bytes", sa.BigInteger()))
    _replace(
        _KEPT,
        ["durable", "model_key", "id", "inflight", "size_bytes"],
        "dropped_at IS NULL AND directory IS NOT NULL",
    )
    _replace(_DROPPED, ["dropped_at"], "dropped_at IS NOT NULL")


def downgrade() -> None:
    op.drop_index(_DROPPED, _TABLE)
    op.create_index(_DROPPED, _TABLE, ["dropped_at"])
    _replace(_KEPT, ["id"], "dropped_at IS NULL")
    op.drop_column(_TABLE, "size_bytes")


def _replace(index: str, columns: list[str], rows: str) -> None:
    where = sa.text(rows)
    op.drop_index(index, _TABLE)
    op.create_index(index, _TABLE, columns, sqlite_where=where, postgresql_where=where)
