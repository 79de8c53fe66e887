"""Records of samples hold the experts of a mixture, and the prompt that they belong to."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    op.add_column("stability_records", sa.Column("prompt", sa.LargeBinary()))
    op.add_column("stability_records", sa.Column("experts", sa.LargeBinary()))


def downgrade() -> None:
    op.drop_column("stability_records", "experts")
    op.drop_column("stability_records", "prompt")
