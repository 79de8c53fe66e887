"""Weight versions of the mutable target of a model (`kind: inflight`)."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.add_column(
        "adapter_versions", sa.Column("inflight", sa.Boolean(), server_default=sa.false(), nullable=False)
    )


def downgrade() -> None:
    op.drop_column("adapter_versions", "inflight")
