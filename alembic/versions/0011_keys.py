"""Keys that rotate, expire and have limits, and their events. Signing secrets move to a file of the home."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"

NULLABLE = {
    "previous_hash": sa.LargeBinary(),
    "previous_until": sa.Float(53),
    "expires_at": sa.Float(53),
    "last_used_at": sa.Float(53),
    "limits": sa.JSON(),
}
BigId = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    for name, kind in NULLABLE.items():
        op.add_column("api_keys", sa.Column(name, kind))
    op.add_column("api_keys", sa.Column("admin", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.create_table(
        "key_events",
        sa.Column("id", BigId, nullable=False),
        sa.Column("at", sa.Float(53), nullable=False),
        sa.Column("key_id", BigId),
        sa.Column("event", sa.String(), nullable=False),
        sa.Column("details", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["key_id"], ["api_keys.id"], name="fk_key_events_key_id"),
        sa.PrimaryKeyConstraint("id", name="pk_key_events"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_key_events_at", "key_events", ["at"])
    op.execute("DELETE FROM server_state WHERE key LIKE 'secret.%'")


def downgrade() -> None:
    op.drop_table("key_events")
    for name in (*NULLABLE, "admin"):
        op.drop_column("api_keys", name)
