"""Responses about sessions, runs, checkpoints and usage, as the SDK's own models read them."""

from datetime import UTC, datetime
from typing import Any

import pytest
import tinker.types as sdk

from skyrl_tinker.protocol.schemas import runs, session_list, usage
from skyrl_tinker.protocol.schemas.base import Message
from skyrl_tinker.protocol.schemas.runs import Checkpoint, TrainingRun
from tests.protocol.support.messages import read_by_the_sdk

NOW = datetime(2026, 1, 2, 3, tzinfo=UTC)
CURSOR = runs.Cursor(offset=0, limit=1, total_count=2)
CHECKPOINT = Checkpoint(
    base_model="b",
    owner="o",
    checkpoint_id="external_weights/a",
    checkpoint_type="external",
    time=NOW,
    tinker_path="tinker://m/external_weights/a",
)
RUN = TrainingRun(training_run_id="m", base_model="b", model_owner="o", is_lora=False, last_request_time=NOW)
STATUSES = (
    None,
    session_list.ActiveStatus(),
    session_list.FinishedStatus(reason=session_list.FinishedReason(type="errored"), detail="d"),
)
USED = (
    usage.TrainingUsage(token_count=1),
    usage.PrefillUsage(cached=True, token_count=1),
    usage.SampleUsage(token_count=1),
    usage.CheckpointUsage(count=1),
    usage.StorageUsage(gigabyte_hours=0.5),
)


def summary(status: Any) -> session_list.SessionSummary:
    return session_list.SessionSummary(
        session_id="s",
        created_at=NOW,
        owner="tml:user:local",
        project_id="p",
        status=status,
        checkpoints_count=1,
        checkpoint_storage_bytes=2,
        display_name=None,
        user_metadata={"a": "b"},
    )


def event(info: usage.EventInfo) -> usage.UsageEvent:
    return usage.UsageEvent(
        bucket_start=NOW,
        bucket_end=NOW,
        base_model="b",
        user_id="tml:user:local",
        user_name="local",
        session_id=None,
        project_id=None,
        event_info=info,
    )


RESPONSES: list[tuple[Message, Any]] = [
    (runs.TrainingRunsResponse(training_runs=[RUN], cursor=CURSOR), sdk.TrainingRunsResponse),
    (runs.CheckpointsResponse(checkpoints=[CHECKPOINT], cursor=CURSOR), sdk.CheckpointsListResponse),
    (runs.CheckpointsResponse(checkpoints=[]), sdk.CheckpointsListResponse),
    (runs.CopyWeightsResponse(tinker_path="p"), sdk.CopyWeightsResponse),
    (session_list.SessionsResponse(sessions=["s"]), sdk.ListSessionsResponse),
    (
        session_list.SessionContents(training_run_ids=["m"], sampler_ids=["s"], user_metadata={}),
        sdk.GetSessionResponse,
    ),
    (
        session_list.SessionSearchResponse(
            sessions=[summary(status) for status in STATUSES],
            next_cursor=session_list.SearchCursor(last_created_at=NOW, last_session_id="s"),
        ),
        sdk.SessionSearchResponse,
    ),
    (
        usage.AuditResponse(
            entries=[usage.AuditEntry(timestamp=NOW, event="checkpoint_create", event_details={"a": 1})]
        ),
        sdk.AuditLogResponse,
    ),
    (
        usage.UsageResponse(
            data=[event(info) for info in USED], sessions={"s": usage.UsageSession(user_metadata={"a": "b"})}
        ),
        sdk.BillingUsageResponse,
    ),
    (
        usage.StorageResponse(
            data=[
                usage.StorageItem(
                    project_id=None,
                    org_user_urn="u",
                    user_name="n",
                    checkpoint_count=1,
                    size_bytes=2,
                    size_gigabytes=2e-9,
                )
            ]
        ),
        sdk.CurrentCheckpointStorageUsageResponse,
    ),
]


@pytest.mark.parametrize(("ours", "theirs"), RESPONSES, ids=[type(ours).__name__ for ours, _ in RESPONSES])
def test_the_sdk_reads_what_we_say(ours: Message, theirs: Any) -> None:
    said = read_by_the_sdk(ours.model_dump(mode="json"))
    assert within(said, theirs.model_validate(said).model_dump(mode="json"))


def within(said: Any, read: Any) -> bool:
    """The SDK may know more fields than we send, but must read all of those."""
    if isinstance(said, dict):
        return all(key in read and within(value, read[key]) for key, value in said.items())
    if isinstance(said, list):
        return len(said) == len(read) and all(map(within, said, read))
    return bool(said == read)


def test_a_search_is_read_as_the_sdk_sends_it() -> None:
    sent = sdk.SessionSearchRequest(
        user_metadata={"a": "b"},
        owner=sdk.UserSearchOwner(owner_urns=["u"]),
        statuses=[sdk.ClientFinishedSessionStatusQuery(reasons=["success"])],
        cursor=sdk.SessionSearchCursor(last_created_at=NOW, last_session_id="s"),
    )
    said = sent.model_dump(mode="json", exclude_none=True)
    read = session_list.SessionSearchRequest.model_validate(said)
    assert read.model_dump(mode="json", exclude_none=True) == said
