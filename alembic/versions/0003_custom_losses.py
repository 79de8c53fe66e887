"""Losses uploaded by clients."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

BigId = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "custom_losses",
        sa.Column("loss_id", sa.String(), nullable=False),
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("seq_id", sa.BigInteger(), nullable=False),
        sa.Column("future_id", BigId, nullable=False),
        sa.Column("definition", sa.LargeBinary(), nullable=True),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.PrimaryKeyConstraint("loss_id", name="pk_custom_losses"),
        sa.UniqueConstraint("session_id", "seq_id", name="uq_custom_losses_session_id_seq_id"),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.session_id"], name="fk_custom_losses_session_id"),
        sa.ForeignKeyConstraint(["future_id"], ["futures.id"], name="fk_custom_losses_future_id"),
    )


def downgrade() -> None:
    op.drop_table("custom_losses")
