"""The bill of a stretch of hours: tokens, checkpoints and what they took, without prices."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection

from skyrl_tinker.api.resources.run_views import as_strings
from skyrl_tinker.api.security.tokens import user_urn
from skyrl_tinker.domain.ids import OwnerId, RequestKind
from skyrl_tinker.protocol.schemas import utc
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
from skyrl_tinker.store import api_keys, usage_records
from skyrl_tinker.store.reports import session_listing, storage
from skyrl_tinker.store.reports.session_listing import Labels
from skyrl_tinker.store.reports.storage import StoredPeriod
from skyrl_tinker.store.usage_records import HOUR_S, Hourly

GIGABYTE = 1e9


@dataclass(frozen=True, slots=True)
class Line:
    hour: int
    base_model: str
    session_id: str | None
    project_id: str | None
    info: EventInfo


def bill(conn: Connection, owner: OwnerId | None, first: int, end: int, now: float) -> UsageResponse:
    """This owner's, of the hours [first, end) since the epoch. May read and count much: for a thread."""
    hourly = usage_records.hourly_between(conn, owner, first, end)
    stored = storage.periods_between(conn, owner, first * HOUR_S, min(end * HOUR_S, now))
    labels = session_listing.find_labels(
        conn, owner, {each.session_id for each in hourly} | {each.session_id for each in stored}
    )
    lines = [
        *(line for each in hourly for line in _tokens(each, labels[each.session_id].project_id)),
        *_saved(stored, first, end),
        *_kept(stored, first, end, now),
    ]
    lines.sort(key=lambda line: (line.hour, -_token_count(line.info)))
    return _response(lines, labels, api_keys.owner_name(conn, owner))


def _tokens(each: Hourly, project_id: str | None) -> Iterator[Line]:
    for info in _infos(each):
        if info.token_count:
            yield Line(each.hour, each.base_model, each.session_id, project_id, info)


def _infos(each: Hourly) -> tuple[TrainingUsage | PrefillUsage | SampleUsage, ...]:
    used = each.usage
    if each.kind is not RequestKind.SAMPLE:
        return (TrainingUsage(token_count=used.input_tokens),)
    return (
        PrefillUsage(cached=False, token_count=used.input_tokens - used.cached_tokens),
        PrefillUsage(cached=True, token_count=used.cached_tokens),
        SampleUsage(token_count=used.output_tokens),
    )


def _saved(stored: Sequence[StoredPeriod], first: int, end: int) -> Iterator[Line]:
    """Checkpoints by the hour in which they were made."""
    counts: Counter[tuple[int, str, str, str | None]] = Counter()
    for each in stored:
        hour = int(each.created_at // HOUR_S)
        if first <= hour < end:
            counts[hour, each.base_model, each.session_id, each.project_id] += 1
    for key, count in counts.items():
        yield Line(*key, CheckpointUsage(count=count))


def _kept(stored: Sequence[StoredPeriod], first: int, end: int, now: float) -> Iterator[Line]:
    """What they took: bytes, hour by hour, as long as they lived."""
    taken: Counter[tuple[int, str, str | None]] = Counter()  # byte seconds
    for each in stored:
        ended = min(now, each.ended_at or now)
        for hour in range(max(first, int(each.created_at // HOUR_S)), min(end, int(ended // HOUR_S) + 1)):
            lived = min(ended, (hour + 1) * HOUR_S) - max(each.created_at, hour * HOUR_S)
            taken[hour, each.base_model, each.project_id] += round(each.size_bytes * lived)
    for (hour, base_model, project), byte_seconds in (+taken).items():
        info = StorageUsage(gigabyte_hours=byte_seconds / HOUR_S / GIGABYTE)
        yield Line(hour, base_model, None, project, info)


def _token_count(info: EventInfo) -> int:
    return info.token_count if isinstance(info, TrainingUsage | PrefillUsage | SampleUsage) else 0


def _response(lines: Sequence[Line], labels: dict[str, Labels], name: str) -> UsageResponse:
    sessions = {line.session_id for line in lines if line.session_id is not None}
    return UsageResponse(
        data=[_event(line, name) for line in lines],
        sessions={
            session: UsageSession(user_metadata=as_strings(labels[session].user_metadata))
            for session in sorted(sessions)
        },
    )


def _event(line: Line, name: str) -> UsageEvent:
    return UsageEvent(
        bucket_start=utc(line.hour * HOUR_S),
        bucket_end=utc((line.hour + 1) * HOUR_S),
        base_model=line.base_model,
        user_id=user_urn(name),
        user_name=name,
        session_id=line.session_id,
        project_id=line.project_id,
        event_info=line.info,
    )
