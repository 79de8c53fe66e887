"""Index along which dropped weight versions are found and deleted."""

from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    op.create_index("ix_adapter_versions_dropped_at", "adapter_versions", ["dropped_at"])


def downgrade() -> None:
    op.drop_index("ix_adapter_versions_dropped_at", "adapter_versions")
