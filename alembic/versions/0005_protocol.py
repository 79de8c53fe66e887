"""Owners of sessions."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
BigId = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


TOKENS = ("input_tokens", "cached_tokens", "output_tokens")


def upgrade() -> None:
    op.add_column("sessions", sa.Column("owner_id", BigId))
    op.create_index("ix_sessions_owner_id", "sessions", ["owner_id"])
    _add_billing()
    _add_publishing()
    op.add_column(
        "sampling_sessions", sa.Column("clones", sa.BigInteger(), server_default=sa.text("0"), nullable=False)
    )


def downgrade() -> None:
    op.drop_column("sampling_sessions", "clones")
    for table in ("usage_records", "audit_events"):
        op.drop_table(table)
    for name in TOKENS:
        op.drop_column("results", name)
    for name in ("removed_at", "public"):
        op.drop_column("checkpoints", name)
    op.drop_index("ix_sessions_owner_id", "sessions")
    op.drop_column("sessions", "owner_id")


def _add_billing() -> None:
    for name in TOKENS:
        op.add_column(
            "results", sa.Column(name, sa.BigInteger(), server_default=sa.text("0"), nullable=False)
        )
    op.create_table(
        "usage_records",
        sa.Column("id", BigId, nullable=False),
        sa.Column("hour", sa.BigInteger(), nullable=False),
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in TOKENS),
        sa.PrimaryKeyConstraint("id", name="pk_usage_records"),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.session_id"], name="fk_usage_records_session_id"),
        sa.UniqueConstraint(
            "hour",
            "session_id",
            "base_model",
            "kind",
            name="uq_usage_records_hour_session_id_base_model_kind",
        ),
        sqlite_autoincrement=True,
    )


def _add_publishing() -> None:
    op.add_column("checkpoints", sa.Column("removed_at", sa.Float(53)))
    op.add_column("checkpoints", sa.Column("public", sa.Boolean(), server_default=sa.false(), nullable=False))
    op.create_table(
        "audit_events",
        sa.Column("id", BigId, nullable=False),
        sa.Column("at", sa.Float(53), nullable=False),
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("event", sa.String(), nullable=False),
        sa.Column("details", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_audit_events"),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.session_id"], name="fk_audit_events_session_id"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_audit_events_at", "audit_events", ["at"])
