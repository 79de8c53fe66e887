"""Client configuration, sessions, telemetry, capabilities."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints

from skyrl_tinker.domain.sampler_abilities import ALL_ABILITIES, SamplerAbilities
from skyrl_tinker.protocol.schemas.base import Items, Message, NullableDict, Table, Text

DETAIL_CHARACTERS = 16_384
KeptDetail = Annotated[str, AfterValidator(lambda text: text[:DETAIL_CHARACTERS].replace("\0", "\\0"))]
"""Most characters kept of a client's text about its end, such as a traceback, which must not be refused."""
NullableTags = Annotated[Items[Text], BeforeValidator(lambda value: [] if value is None else value)]


class ClientConfigRequest(Message):
    """Body of client/config and of client/dynamic_config."""

    sdk_version: str = ""


class SdkFlags(Table):
    """Flags that the SDK reads, by its own names."""

    sample_use_retrieve_futures: bool = False
    """Let SDKs from 0.27 on wait for all samples of a client on one connection"""
    proto_compress_fwdbwd: bool = False
    """Have SDKs from 0.24 on compress bodies of forward_backward with zstd, for slow networks"""
    fwdbwd_max_chunk_bytes_count: int = Field(5_000_000, ge=1)
    """Bytes, before compression, that the SDK sends in one forward_backward"""
    custom_loss_server_side: bool = True
    """Run the losses of create_custom_loss on the server, not on the client"""


class ClientConfigResponse(SdkFlags):
    """Flags for the SDK; any other keeps the SDK's own default.

    `create_model_via_load_weights`: SDKs 0.24 to 0.36 then resume with one request, as newer ones do. Their
    other way (weights_info, create_model, load) loses the optimizer's kind and cannot name full parameters.
    """

    sample_max_concurrent_requests: int = 2000
    sample_dispatch_bytes_semaphore_size: int = 10 << 20
    inflight_response_bytes_semaphore_size: int = 50 << 20
    fwdbwd_max_chunk_len: int = 1024
    fwdbwd_dispatch_bytes_semaphore_size: int = 50_000_000
    pjwt_auth_enabled: bool = True
    parallel_fwdbwd_chunks: bool = True
    create_model_via_load_weights: bool = True
    sample_join_sampling_session: bool = True


class DynamicConfigResponse(Message):
    refresh_interval_sec: int = 300
    sample_cancel_enabled: bool = True


class CreateSessionRequest(Message):
    tags: NullableTags = Field(default_factory=list)
    user_metadata: NullableDict = Field(default_factory=dict)
    sdk_version: Text = ""
    project_id: Text | None = None
    display_name: Text | None = None


class CreateSessionResponse(Message):
    session_id: str
    info_message: str | None = None
    warning_message: str | None = None
    error_message: str | None = None
    type: Literal["create_session"] = "create_session"


class HeartbeatRequest(Message):
    session_id: Text


class HeartbeatResponse(Message):
    type: Literal["session_heartbeat"] = "session_heartbeat"


class FinishReason(Message):
    """Reason of an end. One of a newer SDK is kept as it is, and in lists its session has no status."""

    type: Annotated[Text, StringConstraints(min_length=1, max_length=64)] = "success"


class FinishSessionRequest(Message):
    reason: FinishReason = FinishReason()
    detail: KeptDetail | None = None


class TelemetryResponse(Message):
    """Response to telemetry, which stays unread because events can hold the client's API key."""

    status: Literal["accepted"] = "accepted"


class HealthResponse(Message):
    status: Literal["ok"] = "ok"


class BaseModelState(Message):
    """State of a base model: starting, ready, restarting, failed, which is tried again, or stopped.

    A stopped one starts with its first request.
    """

    base_model: str
    state: str
    detail: str


class ReadyResponse(Message):
    """State of the engine, and of its base models: starting, ready, restarting or failed.

    A base model may also be stopped, and start with its first request.
    """

    state: str
    detail: str
    base_models: list[BaseModelState]


class ErrorResponse(Message):
    """Body of every error response."""

    detail: str


class SupportedModel(Message):
    """`sampler`: its sampling engine by the fields of a request that it serves."""

    model_name: str
    max_context_length: int
    trainable: bool = True
    sampleable: bool = True
    sampler: SamplerAbilities = ALL_ABILITIES


class ServerCapabilitiesResponse(Message):
    supported_models: list[SupportedModel] = Field(default_factory=list)
