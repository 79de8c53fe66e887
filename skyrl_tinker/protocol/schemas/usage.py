"""Usage reports, which have no prices, and the audit log."""

from datetime import date, datetime
from typing import Any, Literal

from pydantic import AwareDatetime, Field

from skyrl_tinker.protocol.schemas.base import Message, StrictQuery, Strings, Text


class AuditQuery(StrictQuery):
    event_type: Literal["all", "checkpoints", "projects", "teams", "organizations"] = "all"
    day: date | None = Field(None, description="YYYY-MM-DD in UTC; default: today")


class AuditEntry(Message):
    """`event`: <resource>_<action>. Checkpoints are also named outside the details, for older SDKs."""

    timestamp: datetime
    event: str
    event_details: dict[str, Any]
    model_id: str | None = None
    tinker_path: str | None = None
    purpose: str | None = None


class AuditResponse(Message):
    """Entries of a day, oldest first."""

    entries: list[AuditEntry]


class UsageQuery(StrictQuery):
    starting_on: AwareDatetime = Field(description="first hour, as in 2026-07-13T00:00:00Z")
    ending_before: AwareDatetime = Field(description="end of the last hour, at most 14 days later")


class TrainingUsage(Message):
    """Tokens of the data of forward and forward_backward requests."""

    type: Literal["training"] = "training"
    token_count: int


class PrefillUsage(Message):
    """Prompt tokens of samples. `cached`: those that the sampler had in its cache."""

    type: Literal["sampling_prefill"] = "sampling_prefill"
    cached: bool
    token_count: int


class SampleUsage(Message):
    """Generated tokens: at temperature 0 those of one sequence, of which all samples are copies."""

    type: Literal["sampling_sample"] = "sampling_sample"
    token_count: int


class CheckpointUsage(Message):
    """Checkpoints saved or copied."""

    type: Literal["checkpoint"] = "checkpoint"
    count: int


class StorageUsage(Message):
    """Storage; 1 GB is 10^9 bytes. No `free` as in SDK 0.38 (default false): SDKs up to 0.28 refuse it."""

    type: Literal["storage"] = "storage"
    gigabyte_hours: float


EventInfo = TrainingUsage | PrefillUsage | SampleUsage | CheckpointUsage | StorageUsage


class UsageEvent(Message):
    """One kind of usage in one hour. Nothing has a price here, so costs are null."""

    bucket_start: datetime
    bucket_end: datetime
    base_model: str
    user_id: str
    user_name: str
    session_id: str | None
    project_id: str | None
    estimated_cost_usd: None = None
    effective_rate_usd_per_million_tokens: None = None
    effective_rate_usd_per_gigabyte_month: None = None
    event_info: EventInfo


class UsageSession(Message):
    user_metadata: Strings | None = None


class UsageResponse(Message):
    """Events by hour, then by tokens, the most first. `sessions`: those of `data`."""

    data: list[UsageEvent]
    sessions: dict[str, UsageSession]
    cost_data_through: None = None


class StorageQuery(StrictQuery):
    project_id: Text | None = Field(None, description="only checkpoints of sessions in this project")


class StorageItem(Message):
    """The live checkpoints of one project."""

    project_id: str | None
    org_user_urn: str
    user_email: str | None = None
    user_name: str
    checkpoint_count: int
    size_bytes: int
    size_gigabytes: float
    estimated_monthly_cost_usd: None = None


class StorageResponse(Message):
    effective_rate_usd_per_gigabyte_month: None = None
    data: list[StorageItem]
