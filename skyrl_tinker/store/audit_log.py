"""Audit log of sessions, checkpoints and API keys. An event is written in the commit of its change."""

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from sqlalchemy import ColumnElement, Connection, false, insert, select, true

from skyrl_tinker.domain.ids import ALL_OWNERS, OwnerId, Reach
from skyrl_tinker.store.database.rows import PAGE, database_time
from skyrl_tinker.store.database.tables import ApiKey, AuditEvent, KeyEvent, Session
from skyrl_tinker.store.owners import OWNER_NAME, within

_EVENT = insert(AuditEvent)
_KEY_EVENT = insert(KeyEvent)


@dataclass(frozen=True, slots=True)
class Event:
    """Change of a session, a checkpoint or a key; `at` is seconds since the epoch."""

    at: float
    event: str
    details: Mapping[str, Any]


def record(conn: Connection, session_id: str, event: str, **details: Any) -> None:
    """Record an event, named <resource>_<action>; `details` are JSON."""
    row = {"at": database_time(conn), "session_id": session_id, "event": event, "details": details}
    conn.execute(_EVENT, row)


def record_key(conn: Connection, event: str, key: OwnerId | None, **details: Any) -> None:
    """Record an event of a key, None: of no known key, or of the whole server."""
    conn.execute(_KEY_EVENT, {"at": database_time(conn), "key_id": key, "event": event, "details": details})


def record_admin(conn: Connection, reach: Reach, key: OwnerId | None, action: str, **details: Any) -> None:
    """Record work that the holder of an admin key ended or deleted; nothing for other keys."""
    if reach is ALL_OWNERS:
        record_key(conn, f"admin_{action}", key, **details)


def events_between(
    conn: Connection,
    reach: Reach,
    start: float,
    end: float,
    resource: str | None,
    skip: int = 0,
    most: int = PAGE,
) -> list[Event]:
    """Return the events in [start, end) that the caller sees, oldest first; `resource` None: of all kinds.

    Of those without the first `skip`, at most `most`. An owner sees those of its own key, an admin also those
    of no key.
    """
    events = _of_sessions(conn, reach, start, end, resource, skip + most)
    if resource is None:
        events += _of_keys(conn, reach, start, end, skip + most)
    return sorted(events, key=attrgetter("at"))[skip : skip + most]


def _of_sessions(
    conn: Connection, reach: Reach, start: float, end: float, resource: str | None, most: int
) -> list[Event]:
    query = (
        select(
            AuditEvent.at,
            AuditEvent.event,
            AuditEvent.session_id,
            OWNER_NAME.label("key"),
            AuditEvent.details,
        )
        .join(Session, Session.session_id == AuditEvent.session_id)
        .outerjoin(ApiKey, ApiKey.id == Session.owner_id)
        .where(within(reach), AuditEvent.at >= start, AuditEvent.at < end)
        .order_by(AuditEvent.at, AuditEvent.id)
        .limit(most)
    )
    if resource is not None:
        query = query.where(AuditEvent.event.startswith(f"{resource}_", autoescape=True))
    return [
        Event(row.at, row.event, {"session_id": row.session_id, "key": row.key, **row.details})
        for row in conn.execute(query)
    ]


def _of_keys(conn: Connection, reach: Reach, start: float, end: float, most: int) -> list[Event]:
    query = (
        select(KeyEvent.at, KeyEvent.event, KeyEvent.key_id, ApiKey.name, KeyEvent.details)
        .outerjoin(ApiKey, ApiKey.id == KeyEvent.key_id)
        .where(_of_key(reach), KeyEvent.at >= start, KeyEvent.at < end)
        .order_by(KeyEvent.at, KeyEvent.id)
        .limit(most)
    )
    return [
        Event(row.at, row.event, {"key_id": row.key_id, "key": row.name, **row.details})
        for row in conn.execute(query)
    ]


def _of_key(reach: Reach) -> ColumnElement[bool]:
    """Return SQL: of the caller's own key. The owner without a key has none: NULL stands for strangers."""
    if reach is ALL_OWNERS:
        return true()
    return false() if reach is None else KeyEvent.key_id == reach
