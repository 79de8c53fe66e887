"""Audit log of sessions and checkpoints."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime, time
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from skyrl_tinker.api.requests.responses import streamed
from skyrl_tinker.api.services import Deps, Reached
from skyrl_tinker.domain.ids import Reach
from skyrl_tinker.protocol.schemas.base import utc
from skyrl_tinker.protocol.schemas.usage import AuditEntry, AuditQuery, AuditResponse
from skyrl_tinker.store import audit_log
from skyrl_tinker.store.audit_log import Event
from skyrl_tinker.store.database.rows import PAGE
from skyrl_tinker.store.store import Store

_DAY_S = 86400

router = APIRouter(tags=["audit"])


@router.get(
    "/audit", name="audit_log", summary="Events of one day (UTC), oldest first", response_model=AuditResponse
)
async def list_events(query: Annotated[AuditQuery, Query()], deps: Deps, reach: Reached) -> Response:
    """Sessions and API keys are in `all` only. Teams and organizations do not exist here.

    An admin key sees the events of all owners, and those of no key.
    """
    start = datetime.combine(query.day or datetime.now(UTC).date(), time(), UTC).timestamp()
    resource = None if query.event_type == "all" else query.event_type.removesuffix("s")
    return await streamed(_json(deps.store, reach, start, resource))


async def _json(store: Store, reach: Reach, start: float, resource: str | None) -> AsyncIterator[str]:
    """Yield an AuditResponse in pieces, a page of events in memory at a time."""
    end, at, skip, sign = start + _DAY_S, start, 0, '{"entries":['
    more = True
    while more:
        read = partial(audit_log.events_between, reach=reach, start=at, end=end, resource=resource)
        page = await store.report(partial(read, skip=skip, most=PAGE), reach)
        more = len(page) == PAGE
        for event in page:
            yield sign + _entry(event).model_dump_json()
            sign = ","
            at, skip = event.at, skip + 1 if event.at == at else 1
    yield f"{sign}]}}" if sign != "," else "]}"


def _entry(event: Event) -> AuditEntry:
    return AuditEntry(
        timestamp=utc(event.at),
        event=event.event,
        event_details=dict(event.details),
        model_id=event.details.get("model_id"),
        tinker_path=event.details.get("tinker_path"),
    )
