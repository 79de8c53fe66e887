"""Usage of a range of hours: tokens, checkpoints and their storage, without prices."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from sqlalchemy import Connection

from skyrl_tinker.api.security.tokens import user_urn
from skyrl_tinker.domain.ids import Reach, RequestKind
from skyrl_tinker.domain.units import GB
from skyrl_tinker.protocol.schemas.base import utc
from skyrl_tinker.protocol.schemas.usage import (
    CheckpointUsage,
    EventInfo,
    PrefillUsage,
    SampleUsage,
    StorageUsage,
    TrainingUsage,
    UsageEvent,
    UsageResponse,
    UsageSession,
)
from skyrl_tinker.store import usage_records
from skyrl_tinker.store.database.rows import AnyRow
from skyrl_tinker.store.reports import session_listing, storage
from skyrl_tinker.store.reports.storage import StoredPeriod
from skyrl_tinker.store.usage_records import HOUR_S, Hourly


def bill(conn: Connection, reach: Reach, first: int, end: int, now: float) -> UsageResponse:
    """Return the usage that the caller sees, in the hours [first, end) since the epoch.

    Its sessions have no metadata yet. May be slow: for a thread.
    """
    hourly = usage_records.hourly_between(conn, reach, first, end)
    stored = storage.periods_between(conn, reach, first * HOUR_S, min(end * HOUR_S, now))
    sessions = {usage.session_id for usage in hourly} | {period.session_id for period in stored}
    labels = session_listing.find_labels(conn, reach, sessions)
    events = [
        *(event for usage in hourly for event in _tokens(usage, labels[usage.session_id])),
        *_saves(stored, labels, first, end),
        *_storage(stored, labels, first, end, now),
    ]
    events.sort(key=lambda event: (event.bucket_start, -getattr(event.event_info, "token_count", 0)))
    of_events = sorted({event.session_id for event in events if event.session_id is not None})
    return UsageResponse(data=events, sessions={session: UsageSession() for session in of_events})


def _tokens(hourly: Hourly, label: AnyRow) -> Iterator[UsageEvent]:
    for info in _token_usages(hourly):
        if info.token_count:
            yield _event(
                hourly.hour, label.owner, hourly.base_model, hourly.session_id, label.project_id, info
            )


def _token_usages(hourly: Hourly) -> tuple[TrainingUsage | PrefillUsage | SampleUsage, ...]:
    usage = hourly.usage
    if hourly.kind is not RequestKind.SAMPLE:
        return (TrainingUsage(token_count=usage.input_tokens),)
    return (
        PrefillUsage(cached=False, token_count=usage.input_tokens - usage.cached_tokens),
        PrefillUsage(cached=True, token_count=usage.cached_tokens),
        SampleUsage(token_count=usage.output_tokens),
    )


def _saves(
    stored: Sequence[StoredPeriod], labels: Mapping[str, AnyRow], first: int, end: int
) -> Iterator[UsageEvent]:
    """Count checkpoints by the hour of their creation."""
    counts: Counter[tuple[int, str, str, str, str | None]] = Counter()
    for period in stored:
        hour = int(period.created_at // HOUR_S)
        if first <= hour < end:
            owner = labels[period.session_id].owner
            counts[hour, owner, period.base_model, period.session_id, period.project_id] += 1
    for key, count in counts.items():
        yield _event(*key, CheckpointUsage(count=count))


def _storage(
    stored: Sequence[StoredPeriod], labels: Mapping[str, AnyRow], first: int, end: int, now: float
) -> Iterator[UsageEvent]:
    """Sum the checkpoints' bytes over the time that they existed, by the hour."""
    totals: Counter[tuple[int, str, str, str | None]] = Counter()  # byte seconds
    for period in stored:
        owner, ended = labels[period.session_id].owner, min(now, period.ended_at or now)
        for hour in range(max(first, int(period.created_at // HOUR_S)), min(end, int(ended // HOUR_S) + 1)):
            seconds = min(ended, (hour + 1) * HOUR_S) - max(period.created_at, hour * HOUR_S)
            totals[hour, owner, period.base_model, period.project_id] += round(period.size_bytes * seconds)
    for (hour, owner, base_model, project), byte_seconds in (+totals).items():
        info = StorageUsage(gigabyte_hours=byte_seconds / HOUR_S / GB)
        yield _event(hour, owner, base_model, None, project, info)


def session_entries(conn: Connection, session_ids: Sequence[str]) -> Iterator[str]:
    """Yield the entries of `sessions` in a bill, as JSON."""
    for session, metadata in session_listing.metadata_of(conn, session_ids).items():
        value = UsageSession(user_metadata=metadata)
        yield f"{json.dumps(session)}:{value.model_dump_json()}"


def _event(
    hour: int, owner: str, base_model: str, session_id: str | None, project_id: str | None, info: EventInfo
) -> UsageEvent:
    return UsageEvent(
        bucket_start=utc(hour * HOUR_S),
        bucket_end=utc((hour + 1) * HOUR_S),
        base_model=base_model,
        user_id=user_urn(owner),
        user_name=owner,
        session_id=session_id,
        project_id=project_id,
        event_info=info,
    )
