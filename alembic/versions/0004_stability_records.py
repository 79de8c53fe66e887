"""Sampled tokens with their logprobs, for `stable_reinforce`."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.create_table(
        "stability_records",
        sa.Column("sequence_id", sa.String(), nullable=False),
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("tokens", sa.LargeBinary(), nullable=False),
        sa.Column("logprobs", sa.LargeBinary(), nullable=False),
        sa.Column("prompt_length", sa.Integer(), nullable=False),
        sa.Column("last_used_at", sa.Float(53), nullable=False),
        sa.PrimaryKeyConstraint("sequence_id", name="pk_stability_records"),
        sa.ForeignKeyConstraint(
            ["session_id"], ["sessions.session_id"], name="fk_stability_records_session_id"
        ),
    )
    op.create_index("ix_stability_records_session_id", "stability_records", ["session_id"])
    op.create_index("ix_stability_records_last_used_at", "stability_records", ["last_used_at"])


def downgrade() -> None:
    op.drop_table("stability_records")
