"""What was used. Nothing has a price here: costs are null."""

import time
from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from skyrl_tinker.api.requests.responses import from_rows
from skyrl_tinker.api.resources.usage_bill import GIGABYTE, bill
from skyrl_tinker.api.security.tokens import user_urn
from skyrl_tinker.api.services import Deps, Owner
from skyrl_tinker.errors import UserError
from skyrl_tinker.protocol.schemas.usage import (
    StorageItem,
    StorageQuery,
    StorageResponse,
    UsageQuery,
    UsageResponse,
)
from skyrl_tinker.store import api_keys
from skyrl_tinker.store.reports import storage
from skyrl_tinker.store.reports.storage import StorageTotal
from skyrl_tinker.store.usage_records import HOUR_S

_MOST_HOURS = 14 * 24

router = APIRouter(tags=["billing"], prefix="/billing/usage")


@router.get(
    "/events",
    summary="Tokens, checkpoints and storage by the hour, for at most 14 days",
    response_model=UsageResponse,
)
async def usage_events(query: Annotated[UsageQuery, Query()], deps: Deps, owner: Owner) -> Response:
    """Up to the last answer. The OpenAI-compatible routes know no sessions, so what they use is not in it."""
    now = time.time()
    first, end = _hour("starting_on", query.starting_on), _hour("ending_before", query.ending_before)
    if first * HOUR_S > now:
        raise UserError(f"starting_on: found {query.starting_on.isoformat()}, expected a time that has come")
    if not 0 < end - first <= _MOST_HOURS:
        raise UserError(
            f"ending_before: found {query.ending_before.isoformat()}, expected a time up to 14 days "
            f"after starting_on ({query.starting_on.isoformat()})"
        )
    return await from_rows(deps.store, lambda conn: bill(conn, owner, first, end, now))


def _hour(name: str, time: datetime) -> int:
    """Since the epoch. UserError for anything between two hours."""
    hour, rest = divmod(time.timestamp(), HOUR_S)
    if rest:
        raise UserError(f"{name}: found {time.isoformat()}, expected a full hour in UTC")
    return int(hour)


@router.get("/checkpoints/current", summary="How many checkpoints there are, and what they take")
async def current_storage(
    query: Annotated[StorageQuery, Query()], deps: Deps, owner: Owner
) -> StorageResponse:
    with deps.store.read() as conn:
        name = api_keys.owner_name(conn, owner)
        found = storage.current_totals(conn, owner, query.project_id)
    return StorageResponse(data=[_item(each, name) for each in found])


def _item(kept: StorageTotal, name: str) -> StorageItem:
    return StorageItem(
        project_id=kept.project_id,
        org_user_urn=user_urn(name),
        user_name=name,
        checkpoint_count=kept.count,
        size_bytes=kept.size_bytes,
        size_gigabytes=kept.size_bytes / GIGABYTE,
    )
