"""What replay needs: unit, effect and row budget of each training request, and snapshots with their unit.

A model that was trained before this has no such record: it could not be brought back, and counts as lost.
"""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"

UPDATED = "the server was updated, and its earlier version kept nothing to rebuild this model from"


def upgrade() -> None:
    op.add_column("futures", sa.Column("unit", sa.BigInteger()))
    op.add_column("futures", sa.Column("effect", sa.String(32)))
    op.add_column("futures", sa.Column("row_budget", sa.BigInteger()))
    pending = sa.text("status = 'pending'")
    op.create_index("ix_futures_pending", "futures", ["id"], sqlite_where=pending, postgresql_where=pending)
    op.add_column("snapshots", sa.Column("optimizer", sa.Boolean(), server_default=sa.true(), nullable=False))
    op.add_column("adapter_versions", sa.Column("future_id", sa.BigInteger()))
    models = sa.table("models", sa.column("state"), sa.column("state_reason"))
    op.execute(models.update().where(models.c.state == "ready").values(state="lost", state_reason=UPDATED))


def downgrade() -> None:
    op.drop_column("adapter_versions", "future_id")
    op.drop_column("snapshots", "optimizer")
    op.drop_index("ix_futures_pending", "futures")
    for name in ("unit", "effect", "row_budget"):
        op.drop_column("futures", name)
