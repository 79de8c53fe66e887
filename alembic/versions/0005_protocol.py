"""Owners of sessions."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
BigId = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.add_column("sessions", sa.Column("owner_id", BigId))
    op.create_index("ix_sessions_owner_id", "sessions", ["owner_id"])


def downgrade() -> None:
    op.drop_index("ix_sessions_owner_id", "sessions")
    op.drop_column("sessions", "owner_id")
