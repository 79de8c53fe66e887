"""Typed schema. `alembic/versions` is its only history; a test holds the two equal.

Times are UTC seconds since the epoch. Client text is never a key that names a directory.
"""

from enum import StrEnum
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Enum,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    UniqueConstraint,
    false,
    text,
    true,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from skyrl_tinker.domain.ids import CheckpointKind, Effect, FutureStatus, ModelState, RequestKind

NAMES = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    "pk": "pk_%(table_name)s",
}
BigId = BigInteger().with_variant(Integer(), "sqlite")
"""SQLite autoincrements only an INTEGER PRIMARY KEY, which has 64 bits there."""


def closed_set(values: type[StrEnum]) -> Enum:
    """Return a column type of an enum's values as plain text: a new member needs no migration."""
    return Enum(
        values, native_enum=False, length=32, values_callable=lambda members: [m.value for m in members]
    )


def partial_index(name: str, *columns: str, where: str, unique: bool = False) -> Index:
    """Return an index of the rows for which a condition holds, in both databases."""
    condition = text(where)
    return Index(name, *columns, unique=unique, sqlite_where=condition, postgresql_where=condition)


class Base(DeclarativeBase):
    metadata = MetaData(naming_convention=NAMES)
    type_annotation_map = {  # noqa: RUF012  (declared so by SQLAlchemy)
        str: String(),
        float: Float(53),
        bytes: LargeBinary(),
        dict[str, Any]: JSON(),
        list[str]: JSON(),
        ModelState: closed_set(ModelState),
        FutureStatus: closed_set(FutureStatus),
        RequestKind: closed_set(RequestKind),
        CheckpointKind: closed_set(CheckpointKind),
        Effect: closed_set(Effect),
    }


class ServerState(Base):
    __tablename__ = "server_state"
    key: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[Any] = mapped_column(JSON)


class ApiKey(Base):
    __tablename__ = "api_keys"
    __table_args__ = {"sqlite_autoincrement": True}  # noqa: RUF012
    id: Mapped[int] = mapped_column(BigId, primary_key=True)
    name: Mapped[str]
    hash: Mapped[bytes] = mapped_column(unique=True)
    created_at: Mapped[float]
    revoked_at: Mapped[float | None]
    previous_hash: Mapped[bytes | None]  # of the secret before the last rotation
    previous_until: Mapped[float | None]
    expires_at: Mapped[float | None]
    last_used_at: Mapped[float | None]
    admin: Mapped[bool] = mapped_column(server_default=false())
    limits: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))


class KeyEvent(Base):
    """Event of API keys. `key_id` None: of no key, as a refused credential that is unknown."""

    __tablename__ = "key_events"
    __table_args__ = {"sqlite_autoincrement": True}  # noqa: RUF012
    id: Mapped[int] = mapped_column(BigId, primary_key=True)
    at: Mapped[float] = mapped_column(index=True)
    key_id: Mapped[int | None] = mapped_column(ForeignKey(ApiKey.id))
    event: Mapped[str]
    details: Mapped[dict[str, Any]]


class Session(Base):
    __tablename__ = "sessions"
    __table_args__ = (Index(None, "finished_at", "last_heartbeat_at"),)
    session_id: Mapped[str] = mapped_column(primary_key=True)
    owner_id: Mapped[int | None] = mapped_column(BigId, index=True)  # api_keys.id, of which none is deleted
    created_at: Mapped[float]
    last_heartbeat_at: Mapped[float]
    finished_at: Mapped[float | None]
    finish_reason: Mapped[str | None]
    finish_detail: Mapped[str | None]
    tags: Mapped[list[str]]
    user_metadata: Mapped[dict[str, Any]]
    project_id: Mapped[str | None]
    display_name: Mapped[str | None]
    sdk_version: Mapped[str]


class Model(Base):
    __tablename__ = "models"
    __table_args__ = (UniqueConstraint("session_id", "model_seq_id"), {"sqlite_autoincrement": True})
    key: Mapped[int] = mapped_column(BigId, primary_key=True)
    model_id: Mapped[str] = mapped_column(unique=True)
    session_id: Mapped[str] = mapped_column(ForeignKey(Session.session_id))
    model_seq_id: Mapped[int] = mapped_column(BigInteger)
    base_model: Mapped[str]
    lora_rank: Mapped[int]
    seed: Mapped[int] = mapped_column(BigInteger)
    train_mlp: Mapped[bool]
    train_attn: Mapped[bool]
    train_unembed: Mapped[bool]
    optimizer_config: Mapped[dict[str, Any]]
    user_metadata: Mapped[dict[str, Any]]
    state: Mapped[ModelState] = mapped_column(index=True)
    state_reason: Mapped[str | None]
    created_at: Mapped[float]
    last_request_at: Mapped[float]
    trained_on: Mapped[str | None]
    parent: Mapped[str | None] = mapped_column(index=True)  # model_id of the run that it goes on from
    steps_before: Mapped[int] = mapped_column(BigInteger, server_default=text("0"))  # of it and its parents


class AdapterVersion(Base):
    """Weight version. The newest published `inflight` one is the mutable target of its model."""

    __tablename__ = "adapter_versions"
    __table_args__ = (
        partial_index(
            "ix_adapter_versions_kept",
            *("durable", "model_key", "id", "inflight", "size_bytes"),
            where="dropped_at IS NULL AND directory IS NOT NULL",
        ),
        partial_index("ix_adapter_versions_dropped_at", "dropped_at", where="dropped_at IS NOT NULL"),
        {"sqlite_autoincrement": True},
    )
    id: Mapped[int] = mapped_column(BigId, primary_key=True)
    model_key: Mapped[int] = mapped_column(ForeignKey(Model.key), index=True)
    kind: Mapped[str]
    directory: Mapped[str | None]
    durable: Mapped[bool]
    inflight: Mapped[bool] = mapped_column(server_default=false())
    created_at: Mapped[float]
    dropped_at: Mapped[float | None]
    future_id: Mapped[int | None] = mapped_column(BigInteger)  # of the save, which replay may repeat
    size_bytes: Mapped[int | None] = mapped_column(BigInteger)  # of its files, once published
    steps: Mapped[int | None] = mapped_column(BigInteger)  # of the model and its parents, once published


class SamplingSession(Base):
    __tablename__ = "sampling_sessions"
    __table_args__ = (UniqueConstraint("session_id", "sampling_session_seq_id"),)
    sampling_session_id: Mapped[str] = mapped_column(primary_key=True)
    session_id: Mapped[str] = mapped_column(ForeignKey(Session.session_id))
    sampling_session_seq_id: Mapped[int] = mapped_column(BigInteger)
    base_model: Mapped[str]
    model_path: Mapped[str | None]
    version_id: Mapped[int | None] = mapped_column(ForeignKey(AdapterVersion.id), index=True)
    created_at: Mapped[float]
    clones: Mapped[int] = mapped_column(BigInteger, server_default=text("0"))  # that joined


class Future(Base):
    """Journal of requests. `id` is the engine's cursor.

    `unit`: number of the unit of work that a training request ran in, and `row_budget` the tokens per row in
    which it succeeded: with both, and the `effect`, replay computes the same again. `tokens`: the most that a
    sample computes, its prompt included, in so many `sequences`.
    """

    __tablename__ = "futures"
    __table_args__ = (
        UniqueConstraint("model_key", "seq_id"),
        UniqueConstraint("sampling_session_id", "seq_id"),
        partial_index("ix_futures_pending", "id", where="status = 'pending'"),
        {"sqlite_autoincrement": True},
    )
    id: Mapped[int] = mapped_column(BigId, primary_key=True)
    request_id: Mapped[str] = mapped_column(unique=True)
    kind: Mapped[RequestKind]
    session_id: Mapped[str | None] = mapped_column(ForeignKey(Session.session_id), index=True)
    model_key: Mapped[int | None] = mapped_column(ForeignKey(Model.key))
    sampling_session_id: Mapped[str | None] = mapped_column(ForeignKey(SamplingSession.sampling_session_id))
    seq_id: Mapped[int | None] = mapped_column(BigInteger)
    digest: Mapped[bytes]
    sequence_ids: Mapped[list[str]]
    status: Mapped[FutureStatus]
    category: Mapped[str | None]
    error: Mapped[str | None]
    created_at: Mapped[float]
    finished_at: Mapped[float | None]
    unit: Mapped[int | None] = mapped_column(BigInteger)
    effect: Mapped[Effect | None]
    row_budget: Mapped[int | None] = mapped_column(BigInteger)
    tokens: Mapped[int | None] = mapped_column(BigInteger)
    sequences: Mapped[int | None] = mapped_column(BigInteger)


class Request(Base):
    """Body of a request that has not finished, that replay needs, or that is kept to be read."""

    __tablename__ = "requests"
    future_id: Mapped[int] = mapped_column(ForeignKey(Future.id), primary_key=True, autoincrement=False)
    body: Mapped[bytes]


class Result(Base):
    """Result in the bytes that the client gets. `id` is the cursor of finished futures."""

    __tablename__ = "results"
    __table_args__ = {"sqlite_autoincrement": True}  # noqa: RUF012
    id: Mapped[int] = mapped_column(BigId, primary_key=True)
    future_id: Mapped[int] = mapped_column(ForeignKey(Future.id), unique=True)
    content_type: Mapped[str]
    body: Mapped[bytes]
    input_tokens: Mapped[int] = mapped_column(BigInteger, server_default=text("0"))
    cached_tokens: Mapped[int] = mapped_column(BigInteger, server_default=text("0"))
    output_tokens: Mapped[int] = mapped_column(BigInteger, server_default=text("0"))


class UsageRecord(Base):
    """Tokens used in an hour, added up from results, which are kept for a shorter time."""

    __tablename__ = "usage_records"
    __table_args__ = (
        UniqueConstraint("hour", "session_id", "base_model", "kind"),
        {"sqlite_autoincrement": True},
    )
    id: Mapped[int] = mapped_column(BigId, primary_key=True)
    hour: Mapped[int] = mapped_column(BigInteger)  # hours since the epoch
    session_id: Mapped[str] = mapped_column(ForeignKey(Session.session_id), index=True)
    base_model: Mapped[str]
    kind: Mapped[RequestKind]
    input_tokens: Mapped[int] = mapped_column(BigInteger)
    cached_tokens: Mapped[int] = mapped_column(BigInteger)
    output_tokens: Mapped[int] = mapped_column(BigInteger)


class AuditEvent(Base):
    """Event, named <resource>_<action>, of its session's owner."""

    __tablename__ = "audit_events"
    __table_args__ = {"sqlite_autoincrement": True}  # noqa: RUF012
    id: Mapped[int] = mapped_column(BigId, primary_key=True)
    at: Mapped[float] = mapped_column(index=True)
    session_id: Mapped[str] = mapped_column(ForeignKey(Session.session_id), index=True)
    event: Mapped[str]
    details: Mapped[dict[str, Any]]


class StepPoint(Base):
    """Point of a training curve: measures by store.console.step_points of one optimizer step."""

    __tablename__ = "step_points"
    __table_args__ = (UniqueConstraint("model_key", "step"), {"sqlite_autoincrement": True})
    id: Mapped[int] = mapped_column(BigId, primary_key=True)
    model_key: Mapped[int] = mapped_column(ForeignKey(Model.key))
    step: Mapped[int] = mapped_column(BigInteger)
    seq_id: Mapped[int] = mapped_column(BigInteger)
    at: Mapped[float] = mapped_column(index=True)
    loss: Mapped[float | None]
    reward_proxy: Mapped[float | None]
    entropy_proxy: Mapped[float | None]
    policy_shift: Mapped[float | None]
    sampler_gap: Mapped[float | None]
    grad_norm: Mapped[float | None]
    learning_rate: Mapped[float | None]
    tokens: Mapped[int] = mapped_column(BigInteger)
    datums: Mapped[int] = mapped_column(BigInteger)
    wait_s: Mapped[float]
    compute_s: Mapped[float]
    answer_s: Mapped[float]
    loss_fn: Mapped[str | None]  # of the last pass of its window, with the configuration as sent
    loss_fn_config: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))


class RunReport(Base):
    """Numbers that a script reported of a step of its run. `reward`: the one that lists show."""

    __tablename__ = "run_reports"
    __table_args__ = (Index(None, "model_key", "id"), {"sqlite_autoincrement": True})
    id: Mapped[int] = mapped_column(BigId, primary_key=True)
    model_key: Mapped[int] = mapped_column(ForeignKey(Model.key))
    step: Mapped[int] = mapped_column(BigInteger)
    at: Mapped[float] = mapped_column(index=True)
    reward: Mapped[float | None]
    numbers: Mapped[dict[str, Any]]


class UploadedLoss(Base):
    """Loss, as protocol.custom_loss.to_bytes stores it; `definition` None: refused, as its future says."""

    __tablename__ = "custom_losses"
    __table_args__ = (UniqueConstraint("session_id", "seq_id"),)
    loss_id: Mapped[str] = mapped_column(primary_key=True)
    session_id: Mapped[str] = mapped_column(ForeignKey(Session.session_id))
    seq_id: Mapped[int] = mapped_column(BigInteger)
    future_id: Mapped[int] = mapped_column(ForeignKey(Future.id), index=True)
    definition: Mapped[bytes | None]
    created_at: Mapped[float]


class StabilityRecord(Base):
    """Sampled sequence: `tokens` and `prompt` int32, `logprobs` float32, all little-endian.

    `experts` [prompt and tokens - 1, layers, k] is a .npy file; it and `prompt` are of router replay.
    """

    __tablename__ = "stability_records"
    sequence_id: Mapped[str] = mapped_column(primary_key=True)
    session_id: Mapped[str] = mapped_column(ForeignKey(Session.session_id), index=True)
    tokens: Mapped[bytes]
    logprobs: Mapped[bytes]
    prompt_length: Mapped[int]
    last_used_at: Mapped[float] = mapped_column(index=True)
    prompt: Mapped[bytes | None]
    experts: Mapped[bytes | None]


class SavedCheckpoint(Base):
    """Checkpoint. The row outlives the files, removed at `removed_at`: billing counts past storage."""

    __tablename__ = "checkpoints"
    __table_args__ = (
        partial_index(
            "uq_checkpoints_live", "model_key", "kind", "name", unique=True, where="deleted_at IS NULL"
        ),
        {"sqlite_autoincrement": True},
    )
    id: Mapped[int] = mapped_column(BigId, primary_key=True)
    model_key: Mapped[int] = mapped_column(ForeignKey(Model.key), index=True)
    kind: Mapped[CheckpointKind]
    name: Mapped[str]
    directory: Mapped[str]
    version_id: Mapped[int | None] = mapped_column(ForeignKey(AdapterVersion.id), index=True)
    base_model: Mapped[str]
    lora_rank: Mapped[int]
    seed: Mapped[int] = mapped_column(BigInteger)
    train_mlp: Mapped[bool]
    train_attn: Mapped[bool]
    train_unembed: Mapped[bool]
    has_optimizer: Mapped[bool]
    optimizer_config: Mapped[dict[str, Any]]
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    user_metadata: Mapped[dict[str, Any]]
    created_at: Mapped[float]
    expires_at: Mapped[float | None]
    deleted_at: Mapped[float | None]
    removed_at: Mapped[float | None] = mapped_column(index=True)
    public: Mapped[bool] = mapped_column(server_default=false())
    steps: Mapped[int] = mapped_column(BigInteger, server_default=text("0"))


class Snapshot(Base):
    """State of a model after `seq_id`, without gradients; replay begins there. `optimizer`: load that too."""

    __tablename__ = "snapshots"
    __table_args__ = (UniqueConstraint("model_key", "seq_id"), {"sqlite_autoincrement": True})
    id: Mapped[int] = mapped_column(BigId, primary_key=True)
    model_key: Mapped[int] = mapped_column(ForeignKey(Model.key))
    seq_id: Mapped[int] = mapped_column(BigInteger)
    directory: Mapped[str]
    optimizer: Mapped[bool] = mapped_column(server_default=true())
    created_at: Mapped[float]
