"""The first schema."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

BigId = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "server_state",
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("value", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("key", name="pk_server_state"),
    )
    op.create_table(
        "api_keys",
        sa.Column("id", BigId, nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("hash", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.Column("revoked_at", sa.Float(53)),
        sa.PrimaryKeyConstraint("id", name="pk_api_keys"),
        sa.UniqueConstraint("hash", name="uq_api_keys_hash"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "sessions",
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.Column("last_heartbeat_at", sa.Float(53), nullable=False),
        sa.Column("finished_at", sa.Float(53)),
        sa.Column("finish_reason", sa.String()),
        sa.Column("finish_detail", sa.String()),
        sa.Column("tags", sa.JSON(), nullable=False),
        sa.Column("user_metadata", sa.JSON(), nullable=False),
        sa.Column("project_id", sa.String()),
        sa.Column("display_name", sa.String()),
        sa.Column("sdk_version", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("session_id", name="pk_sessions"),
    )
    op.create_table(
        "models",
        sa.Column("key", BigId, nullable=False),
        sa.Column("model_id", sa.String(), nullable=False),
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("model_seq_id", sa.BigInteger(), nullable=False),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("lora_rank", sa.Integer(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("train_mlp", sa.Boolean(), nullable=False),
        sa.Column("train_attn", sa.Boolean(), nullable=False),
        sa.Column("train_unembed", sa.Boolean(), nullable=False),
        sa.Column("optimizer_config", sa.JSON(), nullable=False),
        sa.Column("user_metadata", sa.JSON(), nullable=False),
        sa.Column("state", sa.String(32), nullable=False),
        sa.Column("state_reason", sa.String()),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.Column("last_request_at", sa.Float(53), nullable=False),
        sa.PrimaryKeyConstraint("key", name="pk_models"),
        sa.UniqueConstraint("session_id", "model_seq_id", name="uq_models_session_id_model_seq_id"),
        sa.UniqueConstraint("model_id", name="uq_models_model_id"),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.session_id"], name="fk_models_session_id"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_models_state", "models", ["state"])
    op.create_table(
        "adapter_versions",
        sa.Column("id", BigId, nullable=False),
        sa.Column("model_key", BigId, nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("directory", sa.String()),
        sa.Column("durable", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.Column("dropped_at", sa.Float(53)),
        sa.PrimaryKeyConstraint("id", name="pk_adapter_versions"),
        sa.ForeignKeyConstraint(["model_key"], ["models.key"], name="fk_adapter_versions_model_key"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_adapter_versions_model_key", "adapter_versions", ["model_key"])
    op.create_table(
        "sampling_sessions",
        sa.Column("sampling_session_id", sa.String(), nullable=False),
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("sampling_session_seq_id", sa.BigInteger(), nullable=False),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("model_path", sa.String()),
        sa.Column("version_id", BigId),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.PrimaryKeyConstraint("sampling_session_id", name="pk_sampling_sessions"),
        sa.UniqueConstraint(
            "session_id",
            "sampling_session_seq_id",
            name="uq_sampling_sessions_session_id_sampling_session_seq_id",
        ),
        sa.ForeignKeyConstraint(
            ["session_id"], ["sessions.session_id"], name="fk_sampling_sessions_session_id"
        ),
        sa.ForeignKeyConstraint(
            ["version_id"], ["adapter_versions.id"], name="fk_sampling_sessions_version_id"
        ),
    )
    op.create_index("ix_sampling_sessions_version_id", "sampling_sessions", ["version_id"])
    op.create_table(
        "futures",
        sa.Column("id", BigId, nullable=False),
        sa.Column("request_id", sa.String(), nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("session_id", sa.String()),
        sa.Column("model_key", BigId),
        sa.Column("sampling_session_id", sa.String()),
        sa.Column("seq_id", sa.BigInteger()),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("sequence_ids", sa.JSON(), nullable=False),
        sa.Column("status", sa.String(32), nullable=False),
        sa.Column("category", sa.String()),
        sa.Column("error", sa.String()),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.Column("finished_at", sa.Float(53)),
        sa.PrimaryKeyConstraint("id", name="pk_futures"),
        sa.UniqueConstraint("model_key", "seq_id", name="uq_futures_model_key_seq_id"),
        sa.UniqueConstraint("sampling_session_id", "seq_id", name="uq_futures_sampling_session_id_seq_id"),
        sa.UniqueConstraint("request_id", name="uq_futures_request_id"),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.session_id"], name="fk_futures_session_id"),
        sa.ForeignKeyConstraint(["model_key"], ["models.key"], name="fk_futures_model_key"),
        sa.ForeignKeyConstraint(
            ["sampling_session_id"],
            ["sampling_sessions.sampling_session_id"],
            name="fk_futures_sampling_session_id",
        ),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "requests",
        sa.Column("future_id", BigId, autoincrement=False, nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("future_id", name="pk_requests"),
        sa.ForeignKeyConstraint(["future_id"], ["futures.id"], name="fk_requests_future_id"),
    )
    op.create_table(
        "results",
        sa.Column("id", BigId, nullable=False),
        sa.Column("future_id", BigId, nullable=False),
        sa.Column("content_type", sa.String(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_results"),
        sa.UniqueConstraint("future_id", name="uq_results_future_id"),
        sa.ForeignKeyConstraint(["future_id"], ["futures.id"], name="fk_results_future_id"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "checkpoints",
        sa.Column("id", BigId, nullable=False),
        sa.Column("model_key", BigId, nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("directory", sa.String(), nullable=False),
        sa.Column("version_id", BigId),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("lora_rank", sa.Integer(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("train_mlp", sa.Boolean(), nullable=False),
        sa.Column("train_attn", sa.Boolean(), nullable=False),
        sa.Column("train_unembed", sa.Boolean(), nullable=False),
        sa.Column("has_optimizer", sa.Boolean(), nullable=False),
        sa.Column("optimizer_config", sa.JSON(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("user_metadata", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.Column("expires_at", sa.Float(53)),
        sa.Column("deleted_at", sa.Float(53)),
        sa.PrimaryKeyConstraint("id", name="pk_checkpoints"),
        sa.ForeignKeyConstraint(["model_key"], ["models.key"], name="fk_checkpoints_model_key"),
        sa.ForeignKeyConstraint(["version_id"], ["adapter_versions.id"], name="fk_checkpoints_version_id"),
        sqlite_autoincrement=True,
    )
    op.create_index(
        "uq_checkpoints_live",
        "checkpoints",
        ["model_key", "kind", "name"],
        unique=True,
        sqlite_where=sa.text("deleted_at IS NULL"),
        postgresql_where=sa.text("deleted_at IS NULL"),
    )
    op.create_table(
        "snapshots",
        sa.Column("id", BigId, nullable=False),
        sa.Column("model_key", BigId, nullable=False),
        sa.Column("seq_id", sa.BigInteger(), nullable=False),
        sa.Column("directory", sa.String(), nullable=False),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_snapshots"),
        sa.UniqueConstraint("model_key", "seq_id", name="uq_snapshots_model_key_seq_id"),
        sa.ForeignKeyConstraint(["model_key"], ["models.key"], name="fk_snapshots_model_key"),
        sqlite_autoincrement=True,
    )


def downgrade() -> None:
    for table in (
        "snapshots",
        "checkpoints",
        "results",
        "requests",
        "futures",
        "sampling_sessions",
        "adapter_versions",
        "models",
        "sessions",
        "api_keys",
        "server_state",
    ):
        op.drop_table(table)
