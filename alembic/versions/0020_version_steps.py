"""Weight versions have the number of steps that they had taken; runs are found by their parents."""

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"

_PARENT = "ix_models_parent"
# of a version that is here already: by the turn of its save, and if that is purged as its checkpoint has them
_KNOWN = """
UPDATE adapter_versions SET steps = coalesce((
    SELECT models.steps_before + coalesce((
        SELECT max(step_points.step) FROM step_points
        WHERE step_points.model_key = models.key AND step_points.seq_id < futures.seq_id
    ), 0)
    FROM futures JOIN models ON models.key = futures.model_key
    WHERE futures.id = adapter_versions.future_id
), (
    SELECT max(checkpoints.steps) FROM checkpoints WHERE checkpoints.version_id = adapter_versions.id
))
WHERE directory IS NOT NULL
"""


def upgrade() -> None:
    op.add_column("adapter_versions", sa.Column("steps", sa.BigInteger()))
    op.execute(_KNOWN)
    op.create_index(_PARENT, "models", ["parent"])


def downgrade() -> None:
    op.drop_index(_PARENT, "models")
    op.drop_column("adapter_versions", "steps")
