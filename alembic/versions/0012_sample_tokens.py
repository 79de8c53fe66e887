"""Samples carry the tokens and sequences that they are counted as."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    op.add_column("futures", sa.Column("tokens", sa.BigInteger()))
    op.add_column("futures", sa.Column("sequences", sa.BigInteger()))


def downgrade() -> None:
    op.drop_column("futures", "sequences")
    op.drop_column("futures", "tokens")
