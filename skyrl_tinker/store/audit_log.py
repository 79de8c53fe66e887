"""What was done to sessions and checkpoints: written in the commit that does it."""

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
    at: float
    session_id: str
    event: str
    details: Mapping[str, Any]


def record(conn: Connection, session_id: str, event: str, **details: Any) -> None:
    """`event` is <resource>_<action>; `details` are JSON."""
    row = {"at": time.time(), "session_id": session_id, "event": event, "details": details}
    conn.execute(_EVENT, row)


def events_between(
    conn: Connection, owner: OwnerId | None, start: float, end: float, resource: str | None
) -> list[Event]:
    """This owner's in [start, end), oldest first; of one kind of resource, None for all."""
    query = (
        select(AuditEvent.at, AuditEvent.session_id, AuditEvent.event, AuditEvent.details)
        .join(Session, Session.session_id == AuditEvent.session_id)
        .where(owned_by(owner), AuditEvent.at >= start, AuditEvent.at < end)
        .order_by(AuditEvent.id)
    )
    if resource is not None:
        query = query.where(AuditEvent.event.startswith(f"{resource}_", autoescape=True))
    return [Event(*row) for row in conn.execute(query)]
