"""Models, optimizer steps, saves, loads. forward_backward, too large for objects: protobuf."""

from typing import Any, Literal

from pydantic import Field

from skyrl_tinker.protocol.schemas.base import (
    Items,
    Message,
    NullableDict,
    SessionSeqId,
    StrictInt,
    StrictMessage,
    StrictRequest,
    Text,
    TextDict,
    TrainingSeqId,
    WideInt,
)


class TrainingEnvelope(Message):
    """Fields needed to accept a training request and, if the rest is wrong, to fail its future."""

    model_id: Text = Field(min_length=1)
    seq_id: TrainingSeqId


class TrainingRequest(TrainingEnvelope, StrictRequest):
    """Base of training requests."""


class LoraConfig(StrictMessage):
    rank: StrictInt = 32
    seed: WideInt | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class CreateModelRequest(StrictRequest):
    session_id: Text
    model_seq_id: SessionSeqId
    base_model: Text
    user_metadata: NullableDict = Field(default_factory=dict)
    lora_config: LoraConfig | None = None
    optimizer_config: dict[str, Any] | None = None


class CreateModelResult(Message):
    model_id: str
    type: Literal["create_model"] = "create_model"


class CreateViaLoadRequest(StrictRequest):
    """load_weights without model_id: a new model from a checkpoint, with the LoRA config of that."""

    session_id: Text
    model_seq_id: SessionSeqId
    path: Text
    optimizer: bool = False
    base_model: Text | None = None
    user_metadata: NullableDict = Field(default_factory=dict)
    optimizer_config: dict[str, Any] | None = None
    weights_access_token: str | None = None


class LoadWeightsRequest(TrainingRequest):
    """load_weights with model_id: into that model. SDKs before 0.6 send no `optimizer`."""

    path: Text
    optimizer: bool = False
    weights_access_token: str | None = None


class LoadWeightsResult(Message):
    path: str
    model_id: str
    type: Literal["load_weights"] = "load_weights"


class OptimStepRequest(TrainingRequest):
    """Optimizer step with exactly one of the two; validate_step_params checks their contents."""

    adam_params: dict[str, Any] | None = None
    optimizer_params: dict[str, Any] | None = None


class OptimStepResult(Message):
    metrics: dict[str, float] = Field(default_factory=dict)


class SaveWeightsRequest(TrainingRequest):
    path: Text
    ttl_seconds: StrictInt | None = None
    overwrite: bool = False
    user_metadata: TextDict | None = None


class SaveWeightsResult(Message):
    path: str
    type: Literal["save_weights"] = "save_weights"


class SaveExternalRequest(TrainingRequest):
    path: Text
    ttl_seconds: StrictInt | None = None
    age_encryption_recipients: Items[str] | None = None


class SaveExternalResult(Message):
    path: str
    size_bytes: int
    type: Literal["save_weights_external"] = "save_weights_external"


class SaveSamplerRequest(TrainingRequest):
    """Save for the samplers: named (`path`) or ephemeral (`sampling_session_seq_id`)."""

    path: Text | None = None
    sampling_session_seq_id: SessionSeqId | None = None
    kind: Text = "snapshot"
    ttl_seconds: StrictInt | None = None
    user_metadata: TextDict | None = None


class SaveSamplerResult(Message):
    """Result: `path` of a named save, `sampling_session_id` of an ephemeral one; dump with exclude_none."""

    path: str | None = None
    sampling_session_id: str | None = None
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"


class GetInfoRequest(Message):
    model_id: Text


class ModelData(Message):
    """Base model of a run: samplers get `model_name`; the SDK cuts `tokenizer_id` at its first colon."""

    model_name: str
    tokenizer_id: str
    arch: str | None = None


class GetInfoResponse(Message):
    model_id: str
    model_data: ModelData
    is_lora: bool
    lora_rank: int | None = None
    model_name: str
    optimizer_config: dict[str, Any] = Field(default_factory=lambda: {"type": "adamw"})
    type: Literal["get_info"] = "get_info"


class UnloadModelRequest(StrictRequest):
    model_id: Text


class UnloadModelResult(Message):
    model_id: str
    type: Literal["unload_model"] = "unload_model"
