"""Points of training curves have the loss function of their step, with its configuration."""

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"


def upgrade() -> None:
    op.add_column("step_points", sa.Column("loss_fn", sa.String()))
    op.add_column("step_points", sa.Column("loss_fn_config", sa.JSON()))


def downgrade() -> None:
    op.drop_column("step_points", "loss_fn_config")
    op.drop_column("step_points", "loss_fn")
