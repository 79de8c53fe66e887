"""Training runs and their checkpoints."""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field, Strict

from skyrl_tinker.protocol.schemas.base import MAX_INT64, Message, SessionSeqId

AccessScope = Literal["owned", "accessible"]


class Paging(Message):
    """Query parameters of every list."""

    limit: int = Field(100, ge=1, le=10_000, description="most items in the answer")
    offset: int = Field(0, ge=0, le=MAX_INT64, description="how many to pass over")


class Cursor(Message):
    """`total_count`: items over all pages."""

    offset: int
    limit: int
    total_count: int


class Checkpoint(Message):
    """`checkpoint_id` is `<weights|sampler_weights|external_weights>/<name>`; times carry a timezone."""

    checkpoint_id: str
    checkpoint_type: Literal["training", "sampler", "external"]
    time: datetime
    tinker_path: str
    size_bytes: int | None = None
    public: bool = False
    user_metadata: dict[str, str] | None = None
    expires_at: datetime | None = None


class TrainingRun(Message):
    """`training_run_id` is the model_id. Metadata is strings here, though create_model takes any JSON."""

    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool
    last_request_time: datetime
    corrupted: bool = False
    lora_rank: int | None = None
    last_checkpoint: Checkpoint | None = None
    last_sampler_checkpoint: Checkpoint | None = None
    user_metadata: dict[str, str] | None = None


class TrainingRunQuery(Message):
    access_scope: AccessScope = Field(
        "owned", description="accessible: others' runs, too, as far as they have published checkpoints"
    )


class TrainingRunsQuery(Paging):
    limit: int = Field(20, ge=1, le=10_000, description="most runs in the answer")
    access_scope: AccessScope = Field(
        "owned", description="accessible: others' runs, too, as far as they have published checkpoints"
    )
    project_id: str | None = Field(None, description="only runs of sessions in this project")


class TrainingRunsResponse(Message):
    """The run that was asked something last comes first."""

    training_runs: list[TrainingRun]
    cursor: Cursor


class CheckpointsResponse(Message):
    """`cursor`: None where there are no pages."""

    checkpoints: list[Checkpoint]
    cursor: Cursor | None = None


class ExternalWeightsUrlsResponse(Message):
    """URLs for a GET without headers, valid until `expires`, which has a timezone."""

    urls: dict[str, str]
    expires: datetime


class SetTtlRequest(Message):
    """null: the checkpoint never expires."""

    ttl_seconds: Annotated[int, Strict()] | None


class CopyWeightsRequest(Message):
    """Either a project, where a new session is made, or a live session and a number for the new run in it."""

    source_path: str
    destination_project_id: str | None = None
    session_id: str | None = None
    model_seq_id: SessionSeqId | None = None
    ttl_seconds: Annotated[int, Strict()] | None = None
    weights_access_token: str | None = None


class CopyWeightsResponse(Message):
    tinker_path: str


class WeightsInfoRequest(Message):
    tinker_path: str


class WeightsInfoResponse(Message):
    base_model: str
    is_lora: bool
    lora_rank: int | None = None
    train_unembed: bool | None = None
    train_mlp: bool | None = None
    train_attn: bool | None = None
    optimizer_config: dict[str, Any] = Field(default_factory=lambda: {"type": "adamw"})
