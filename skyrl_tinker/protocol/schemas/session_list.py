"""Sessions: listed, searched, and traced."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import AwareDatetime, Field, StringConstraints

from skyrl_tinker.protocol.schemas.base import (
    Items,
    Message,
    StrictMessage,
    StrictQuery,
    Strings,
    Text,
    TextDict,
)
from skyrl_tinker.protocol.schemas.runs import MOST_ITEMS, AccessScope, Paging

FinishedBy = Literal["success", "errored", "interrupted"]
ShortText = Annotated[Text, StringConstraints(min_length=1)]


class SessionQuery(StrictQuery):
    access_scope: AccessScope = Field(
        "owned", description="both are the same here: others' sessions are never visible"
    )


class SessionsQuery(Paging, SessionQuery):
    limit: int = Field(20, ge=1, le=MOST_ITEMS, description="most sessions in the response")


class SessionsResponse(Message):
    """Session ids, newest first."""

    sessions: list[str]


class SessionContents(Message):
    """Contents of a session. Metadata values are strings, though create_session takes any JSON."""

    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: Strings
    display_name: str | None = None


class SetProjectRequest(StrictMessage):
    project_id: ShortText


class SearchOwner(StrictMessage):
    """Owner to search for. `owner_urns` belongs to the type `user`."""

    type: Literal["own", "accessible", "user"] = "own"
    owner_urns: Items[Text] = Field(default_factory=list, max_length=10)


class StatusQuery(StrictMessage):
    """Status to search for. `reasons` belongs to the type `client_finished`."""

    type: Literal["active", "cancelled", "failed", "client_finished"]
    reasons: Items[FinishedBy] | None = Field(None, min_length=1)


class SearchCursor(StrictMessage):
    last_created_at: AwareDatetime
    last_session_id: Text


class SessionSearchRequest(StrictMessage):
    """Search filters. All that are given must match, but only one of `session_id` and `display_name`."""

    session_id: Text | None = None
    project_ids: Items[Text] | None = Field(None, max_length=100)
    user_metadata: TextDict = Field(default_factory=dict, max_length=32)
    display_name: ShortText | None = None
    owner: SearchOwner = SearchOwner()
    statuses: Items[StatusQuery] | None = Field(None, min_length=1, max_length=16)
    limit: int = Field(50, ge=1, le=200)
    cursor: SearchCursor | None = None


class ActiveStatus(Message):
    type: Literal["active"] = "active"


class FinishedReason(Message):
    type: FinishedBy


class FinishedStatus(Message):
    type: Literal["client_finished"] = "client_finished"
    reason: FinishedReason
    detail: str | None = None


class SessionSummary(Message):
    """Summary of a session. `status` is None for one that ended, but not by its client."""

    session_id: str
    created_at: datetime
    owner: str
    project_id: str
    status: ActiveStatus | FinishedStatus | None
    checkpoints_count: int
    checkpoint_storage_bytes: int
    display_name: str | None
    user_metadata: Strings


class SessionSearchResponse(Message):
    """Sessions, newest first. `next_cursor` is None on the last page."""

    sessions: list[SessionSummary]
    next_cursor: SearchCursor | None = None


class TraceExportResponse(Message):
    """`status` is never pending: the trace is made while it is fetched."""

    status: Literal["ready"] = "ready"
    url: str
