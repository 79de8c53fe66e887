"""Index of the weight versions that are kept, for sweeps that must not read all that ever were."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    kept = sa.text("dropped_at IS NULL")
    op.create_index(
        "ix_adapter_versions_kept",
        "adapter_versions",
        ["id"],
        sqlite_where=kept,
        postgresql_where=kept,
    )


def downgrade() -> None:
    op.drop_index("ix_adapter_versions_kept", "adapter_versions")
