"""Audit log of sessions and checkpoints."""

from collections.abc import Mapping
from datetime import UTC, datetime, time
from typing import Annotated

from fastapi import APIRouter, Query
from sqlalchemy import Connection
from starlette.responses import Response

from skyrl_tinker.api.requests.responses import json_from_rows
from skyrl_tinker.api.services import Deps, Reached
from skyrl_tinker.protocol.schemas.base import utc
from skyrl_tinker.protocol.schemas.usage import AuditEntry, AuditQuery, AuditResponse
from skyrl_tinker.store import audit_log
from skyrl_tinker.store.audit_log import Event

_DAY_S = 86400
_RESOURCES: Mapping[str, str] = {
    "checkpoints": "checkpoint",
    "projects": "project",
    "teams": "team",
    "organizations": "organization",
}

router = APIRouter(tags=["audit"])


@router.get(
    "/audit", name="audit_log", summary="Events of one day (UTC), oldest first", response_model=AuditResponse
)
async def list_events(query: Annotated[AuditQuery, Query()], deps: Deps, reach: Reached) -> Response:
    """Sessions and API keys are in `all` only. Teams and organizations do not exist here.

    An admin key sees the events of all owners, and those of no key.
    """
    start = datetime.combine(query.day or datetime.now(UTC).date(), time(), UTC).timestamp()
    resource = _RESOURCES.get(query.event_type)

    def read(conn: Connection) -> AuditResponse:
        events = audit_log.events_between(conn, reach, start, start + _DAY_S, resource)
        return AuditResponse(entries=[_entry(event) for event in events])

    return await json_from_rows(deps.store, read)


def _entry(event: Event) -> AuditEntry:
    return AuditEntry(
        timestamp=utc(event.at),
        event=event.event,
        event_details=dict(event.details),
        model_id=event.details.get("model_id"),
        tinker_path=event.details.get("tinker_path"),
    )
