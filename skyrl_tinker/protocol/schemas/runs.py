"""Training runs and their checkpoints."""

from datetime import datetime
from typing import Any, Literal

from pydantic import Field

from skyrl_tinker.protocol.schemas.base import (
    MAX_INT64,
    Message,
    SessionSeqId,
    StrictInt,
    StrictMessage,
    StrictQuery,
    Strings,
    Text,
)

AccessScope = Literal["owned", "accessible"]
MOST_ITEMS = 1000
"""Items of one page, each of which may have metadata of `keys.metadata_kb`."""


class Paging(StrictQuery):
    """Query parameters of every list."""

    limit: int = Field(100, ge=1, le=MOST_ITEMS, description="most items in the response")
    offset: int = Field(0, ge=0, le=MAX_INT64, description="number of items to skip")


class Cursor(Message):
    """Position in a list. `total_count`: items of all pages."""

    offset: int
    limit: int
    total_count: int


class Checkpoint(Message):
    """A checkpoint; its id is `<weights|sampler_weights|external_weights>/<name>`, times have a timezone.

    `base_model` is known to SDKs from 0.39 on, `owner`, the name of its key, to none.
    """

    checkpoint_id: str
    checkpoint_type: Literal["training", "sampler", "external"]
    time: datetime
    tinker_path: str
    size_bytes: int | None = None
    public: bool = False
    user_metadata: Strings | None = None
    expires_at: datetime | None = None
    base_model: str
    owner: str


class TrainingRun(Message):
    """A training run; its id is the model_id. Metadata is strings, though create_model takes any JSON."""

    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool
    last_request_time: datetime
    corrupted: bool = False
    lora_rank: int | None = None
    last_checkpoint: Checkpoint | None = None
    last_sampler_checkpoint: Checkpoint | None = None
    user_metadata: Strings | None = None


class TrainingRunQuery(StrictQuery):
    access_scope: AccessScope = Field(
        "owned", description="accessible: also others' runs with published checkpoints"
    )


class TrainingRunsQuery(TrainingRunQuery, Paging):
    limit: int = Field(20, ge=1, le=MOST_ITEMS, description="most runs in the response")
    project_id: Text | None = Field(None, description="only runs of sessions in this project")


class TrainingRunsResponse(Message):
    """Training runs, the last used first."""

    training_runs: list[TrainingRun]
    cursor: Cursor


class CheckpointsResponse(Message):
    """Checkpoints. `cursor` is None where the list is not paged."""

    checkpoints: list[Checkpoint]
    cursor: Cursor | None = None


class ExternalWeightsUrlsResponse(Message):
    """URLs for a GET without headers, valid until `expires`, which has a timezone."""

    urls: dict[str, str]
    expires: datetime


class SetTtlRequest(StrictMessage):
    """New time to live; null: the checkpoint never expires."""

    ttl_seconds: StrictInt | None


class CopyWeightsRequest(StrictMessage):
    """Copy to a project, where a new session is made, or into a live session, as run `model_seq_id`."""

    source_path: Text
    destination_project_id: Text | None = None
    session_id: Text | None = None
    model_seq_id: SessionSeqId | None = None
    ttl_seconds: StrictInt | None = None
    weights_access_token: str | None = None


class CopyWeightsResponse(Message):
    tinker_path: str


class WeightsInfoRequest(Message):
    tinker_path: Text


class WeightsInfoResponse(Message):
    base_model: str
    is_lora: bool
    lora_rank: int | None = None
    train_unembed: bool | None = None
    train_mlp: bool | None = None
    train_attn: bool | None = None
    optimizer_config: dict[str, Any] = Field(default_factory=lambda: {"type": "adamw"})
