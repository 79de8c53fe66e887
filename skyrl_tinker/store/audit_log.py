"""Audit log of sessions and checkpoints. An event is written in the commit of its change."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, insert, select

from skyrl_tinker.domain.ids import OwnerId
from skyrl_tinker.store.database.tables import AuditEvent, Session
from skyrl_tinker.store.owners import owned_by

_EVENT = insert(AuditEvent)


@dataclass(frozen=True, slots=True)
class Event:
    """Change of a session or checkpoint; `at` is seconds since the epoch."""

    at: float
    session_id: str
    event: str
    details: Mapping[str, Any]


def record(conn: Connection, session_id: str, event: str, **details: Any) -> None:
    """Record an event, named <resource>_<action>; `details` are JSON."""
    row = {"at": time.time(), "session_id": session_id, "event": event, "details": details}
    conn.execute(_EVENT, row)


def events_between(
    conn: Connection, owner: OwnerId | None, start: float, end: float, resource: str | None
) -> list[Event]:
    """Return this owner's events in [start, end), oldest first; `resource` None: of all kinds."""
    query = (
        select(AuditEvent.at, AuditEvent.session_id, AuditEvent.event, AuditEvent.details)
        .join(Session, Session.session_id == AuditEvent.session_id)
        .where(owned_by(owner), AuditEvent.at >= start, AuditEvent.at < end)
        .order_by(AuditEvent.id)
    )
    if resource is not None:
        query = query.where(AuditEvent.event.startswith(f"{resource}_", autoescape=True))
    return [Event(*row) for row in conn.execute(query)]
