"""Points of training curves, one for each optimizer step."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"

MEASURED = (
    "loss",
    "reward_proxy",
    "entropy_proxy",
    "policy_shift",
    "sampler_gap",
    "grad_norm",
    "learning_rate",
)
BigId = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "step_points",
        sa.Column("id", BigId, nullable=False),
        sa.Column("model_key", BigId, nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("seq_id", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.Float(53), nullable=False),
        *(sa.Column(name, sa.Float(53)) for name in MEASURED),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.Column("datums", sa.BigInteger(), nullable=False),
        *(sa.Column(name, sa.Float(53), nullable=False) for name in ("wait_s", "compute_s", "answer_s")),
        sa.ForeignKeyConstraint(["model_key"], ["models.key"], name="fk_step_points_model_key"),
        sa.PrimaryKeyConstraint("id", name="pk_step_points"),
        sa.UniqueConstraint("model_key", "step", name="uq_step_points_model_key_step"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_step_points_at", "step_points", ["at"])


def downgrade() -> None:
    op.drop_table("step_points")
