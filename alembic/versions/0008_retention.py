"""Indexes along which old rows are found and deleted: SQLite looks for the children of each deleted row."""

from alembic import op

revision = "0008"
down_revision = "0007"

INDEXES = {
    "sessions": (("finished_at", "last_heartbeat_at"),),
    "futures": (("session_id",),),
    "usage_records": (("session_id",),),
    "audit_events": (("session_id",),),
    "custom_losses": (("future_id",),),
    "checkpoints": (("model_key",), ("version_id",), ("removed_at",)),
}


def upgrade() -> None:
    for table, indexes in INDEXES.items():
        for columns in indexes:
            op.create_index(_name(table, columns), table, list(columns))


def downgrade() -> None:
    for table, indexes in INDEXES.items():
        for columns in indexes:
            op.drop_index(_name(table, columns), table)


def _name(table: str, columns: tuple[str, ...]) -> str:
    return "_".join(("ix", table, *columns))
