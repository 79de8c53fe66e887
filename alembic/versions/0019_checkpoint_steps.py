"""Checkpoints have the number of steps that their weights had taken."""

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"

# of a checkpoint that is here already: the steps until it was recorded, some of which may have come after it
_KNOWN = """
UPDATE checkpoints SET steps = coalesce((
    SELECT models.steps_before + coalesce(max(step_points.step), 0)
    FROM models LEFT JOIN step_points
        ON step_points.model_key = models.key AND step_points.at <= checkpoints.created_at
    WHERE models.key = checkpoints.model_key
    GROUP BY models.key
), 0)
"""


def upgrade() -> None:
    steps = sa.Column("steps", sa.BigInteger(), server_default=sa.text("0"), nullable=False)
    op.add_column("checkpoints", steps)
    op.execute(_KNOWN)


def downgrade() -> None:
    op.drop_column("checkpoints", "steps")
