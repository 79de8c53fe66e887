"""Models name the base model that they were trained on, by its fingerprint."""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    op.add_column("models", sa.Column("trained_on", sa.String()))


def downgrade() -> None:
    op.execute("UPDATE models SET state = 'lost' WHERE state = 'parked'")  # a state that it does not know
    op.drop_column("models", "trained_on")
