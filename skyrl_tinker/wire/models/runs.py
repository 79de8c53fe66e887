"""Training runs and their checkpoints."""

from datetime import datetime
from typing import Any, Literal

from pydantic import Field

from skyrl_tinker.wire.models.base import Message


class Checkpoint(Message):
    """`checkpoint_id` is `weights/<name>` or `sampler_weights/<name>`; times carry a timezone."""

    checkpoint_id: str
    checkpoint_type: Literal["training", "sampler"]
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
