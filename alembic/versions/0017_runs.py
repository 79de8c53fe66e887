"""Runs have parents, and numbers that their scripts report."""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"

BigId = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.add_column("models", sa.Column("parent", sa.String()))
    op.add_column(
        "models", sa.Column("steps_before", sa.BigInteger(), server_default=sa.text("0"), nullable=False)
    )
    op.create_table(
        "run_reports",
        sa.Column("id", BigId, nullable=False),
        sa.Column("model_key", BigId, nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.Float(53), nullable=False),
        sa.Column("reward", sa.Float(53)),
        sa.Column("numbers", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["model_key"], ["models.key"], name="fk_run_reports_model_key"),
        sa.PrimaryKeyConstraint("id", name="pk_run_reports"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_run_reports_at", "run_reports", ["at"])
    op.create_index("ix_run_reports_model_key_id", "run_reports", ["model_key", "id"])


def downgrade() -> None:
    op.drop_table("run_reports")
    op.drop_column("models", "steps_before")
    op.drop_column("models", "parent")
