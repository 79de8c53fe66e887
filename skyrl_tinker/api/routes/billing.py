"""Usage, without prices: costs are null."""

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Query
from sqlalchemy import Connection
from starlette.responses import Response

from skyrl_tinker.api.requests.responses import json_by_parts, json_from_rows
from skyrl_tinker.api.resources.usage_bill import bill, session_entries
from skyrl_tinker.api.security.tokens import user_urn
from skyrl_tinker.api.services import Deps, Reached
from skyrl_tinker.domain.units import GB
from skyrl_tinker.errors import UserError
from skyrl_tinker.protocol.schemas.usage import (
    StorageItem,
    StorageQuery,
    StorageResponse,
    UsageQuery,
    UsageResponse,
)
from skyrl_tinker.store.database.rows import AnyRow
from skyrl_tinker.store.reports import storage
from skyrl_tinker.store.usage_records import HOUR_S

_MOST_HOURS = 14 * 24

router = APIRouter(tags=["billing"], prefix="/billing/usage")


@router.get(
    "/events",
    summary="Tokens, checkpoints and storage by the hour, for at most 14 days",
    response_model=UsageResponse,
)
async def usage_events(query: Annotated[UsageQuery, Query()], deps: Deps, reach: Reached) -> Response:
    """Usage up to the last answer. OpenAI clients of an owner are one session; a stream counts at its end."""
    now = deps.store.now()
    first, end = _hour("starting_on", query.starting_on), _hour("ending_before", query.ending_before)
    if first * HOUR_S > now:
        raise UserError(f"starting_on: found {query.starting_on.isoformat()}, expected a time in the past")
    if not 0 < end - first <= _MOST_HOURS:
        raise UserError(
            f"ending_before: found {query.ending_before.isoformat()}, expected a time at most 14 days "
            f"after starting_on ({query.starting_on.isoformat()})"
        )
    usage = await deps.store.report(lambda conn: bill(conn, reach, first, end, now), reach)
    answer, sessions = usage.model_copy(update={"sessions": {}}), list(usage.sessions)
    return await json_by_parts(deps.store, reach, answer, "sessions", sessions, session_entries)


def _hour(name: str, value: datetime) -> int:
    """Return the hour since the epoch. UserError unless it is a full hour."""
    hour, rest = divmod(value.timestamp(), HOUR_S)
    if rest:
        raise UserError(f"{name}: found {value.isoformat()}, expected a full hour in UTC")
    return int(hour)


@router.get(
    "/checkpoints/current",
    summary="Number and size of the checkpoints, by project",
    response_model=StorageResponse,
)
async def current_storage(query: Annotated[StorageQuery, Query()], deps: Deps, reach: Reached) -> Response:
    def read(conn: Connection) -> StorageResponse:
        totals = storage.current_totals(conn, reach, query.project_id)
        return StorageResponse(data=[_item(total) for total in totals])

    return await json_from_rows(deps.store, reach, read)


def _item(total: AnyRow) -> StorageItem:
    return StorageItem(
        project_id=total.project_id,
        org_user_urn=user_urn(total.owner),
        user_name=total.owner,
        checkpoint_count=total.checkpoint_count,
        size_bytes=total.size_bytes,
        size_gigabytes=total.size_bytes / GB,
    )
