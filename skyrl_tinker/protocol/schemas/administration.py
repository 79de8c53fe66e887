"""Messages of administrators: API keys with their limits, and base models that start on demand."""

from datetime import datetime
from typing import Literal

from pydantic import Field

from skyrl_tinker.protocol.schemas.base import Message, StrictFloat, StrictRequest, Text

MOST_S = 10 * 366 * 86400
"""Longest duration that a key may be given."""


class OwnedNow(Message):
    """Holdings of one owner, and its tokens of the last 24 hours."""

    sessions: int
    models: int
    checkpoints: int
    stored_bytes: int
    trained_tokens: int
    prompt_tokens: int
    sampled_tokens: int


Limit = float | None
"""A limit of a key; null: none."""


class KeySummary(Message):
    """Key, without its secret. `limits`: those of its own. `previous_until`: end of the secret before."""

    id: int
    name: str
    admin: bool
    live: bool
    created_at: datetime
    last_used_at: datetime | None
    expires_at: datetime | None
    revoked_at: datetime | None
    previous_until: datetime | None
    limits: dict[str, Limit]
    owned: OwnedNow


class AdminResponse(Message):
    """Keys, oldest first, and the work done without one. `limits`: of all keys (setting keys)."""

    keys: list[KeySummary]
    without_key: OwnedNow
    limits: dict[str, Limit]


class CreateKeyRequest(StrictRequest):
    name: Text
    admin: bool = False
    expires_in_s: StrictFloat | None = Field(None, gt=0, le=MOST_S)


class RotateKeyRequest(StrictRequest):
    """`overlap_s`: how long the present secret stays valid. `expires_in_s` null: its expiry stays."""

    overlap_s: StrictFloat = Field(3600, ge=0, le=MOST_S)
    expires_in_s: StrictFloat | None = Field(None, gt=0, le=MOST_S)


class AdoptRequest(StrictRequest):
    """`former`: a revoked or expired key, by id or name, or `none` for the work done without a key."""

    former: Text


class AdoptResponse(Message):
    """Number of sessions that the key owns from now on, with their runs, checkpoints and usage."""

    sessions: int


class LimitKeyRequest(StrictRequest):
    """Limits by name: a number, "none", or "default" for that of all keys."""

    limits: dict[str, StrictFloat | Literal["none", "default"]] = Field(fail_fast=True)


class ChangeBaseRequest(StrictRequest):
    """Base model that is on demand, by any of its names. `stop`: once no request waits or runs."""

    base_model: Text
    action: Literal["start", "stop"]


class ChangeBaseResponse(Message):
    """Base model by its canonical name, and what follows."""

    base_model: str
    detail: str


class NewSecretResponse(Message):
    """Secret, shown only this once."""

    key: str


class KeyLimitsResponse(Message):
    """Limits that the key has of its own now."""

    limits: dict[str, Limit]
