"""Sessions: listed, looked into, searched, put into projects."""

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Query, Request
from sqlalchemy import Connection
from starlette.responses import Response

from skyrl_tinker.api.openapi.documents import takes
from skyrl_tinker.api.requests.request_body import read_model
from skyrl_tinker.api.requests.responses import from_rows
from skyrl_tinker.api.resources.run_views import as_strings
from skyrl_tinker.api.security.tokens import user_urn
from skyrl_tinker.api.services import Deps, Owner
from skyrl_tinker.domain.ids import SessionId
from skyrl_tinker.protocol.schemas import utc
from skyrl_tinker.protocol.schemas.session_list import (
    ActiveStatus,
    FinishedReason,
    FinishedStatus,
    SearchCursor,
    SearchOwner,
    SessionContents,
    SessionQuery,
    SessionSearchRequest,
    SessionSearchResponse,
    SessionsQuery,
    SessionsResponse,
    SessionSummary,
    SetProjectRequest,
)
from skyrl_tinker.store import api_keys
from skyrl_tinker.store.reports import session_listing
from skyrl_tinker.store.reports.session_listing import Search, SearchPosition, SessionMatch, SessionStatus

router = APIRouter(tags=["sessions"], prefix="/sessions")


@router.get("", summary="The ids of your sessions, newest first")
async def list_sessions(
    query: Annotated[SessionsQuery, Query()], deps: Deps, owner: Owner
) -> SessionsResponse:
    with deps.store.read() as conn:
        return SessionsResponse(sessions=session_listing.list_ids(conn, owner, query.limit, query.offset))


@router.post(
    "/search",
    summary="Search your sessions by metadata, name, project and status",
    openapi_extra=takes(SessionSearchRequest),
    response_model=SessionSearchResponse,
)
async def search_sessions(request: Request, deps: Deps, owner: Owner) -> Response:
    wanted = await read_model(request, SessionSearchRequest)

    def read(conn: Connection) -> SessionSearchResponse:
        urn = user_urn(api_keys.owner_name(conn, owner))
        if not _about(wanted.owner, urn):
            return SessionSearchResponse(sessions=[])
        found = session_listing.search(conn, owner, _search(wanted), wanted.limit + 1)
        return _answer(found, wanted.limit, urn)

    return await from_rows(deps.store, read)


@router.get("/{session_id}", summary="What a session has made")
async def get_session(
    session_id: str, query: Annotated[SessionQuery, Query()], deps: Deps, owner: Owner
) -> SessionContents:
    with deps.store.read() as conn:
        found = session_listing.totals(conn, owner, SessionId(session_id))
    return SessionContents(
        training_run_ids=found.training_runs,
        sampler_ids=found.samplers,
        user_metadata=as_strings(found.user_metadata),
        display_name=found.display_name,
    )


@router.put(
    "/{session_id}/project",
    summary="Put a session, with all that it made, into a project",
    openapi_extra=takes(SetProjectRequest),
)
async def set_project(session_id: str, request: Request, deps: Deps, owner: Owner) -> dict[str, str]:
    """There is no list of projects: a project is whatever sessions name."""
    wanted = await read_model(request, SetProjectRequest)
    await deps.store.write(
        lambda conn: session_listing.set_project(conn, owner, SessionId(session_id), wanted.project_id)
    )
    return {}


def _about(owner: SearchOwner, urn: str) -> bool:
    """Nobody sees the sessions of others."""
    return owner.type != "user" or urn in owner.owner_urns


def _search(wanted: SessionSearchRequest) -> Search:
    statuses, cursor = wanted.statuses, wanted.cursor
    return Search(
        session_id=wanted.session_id,
        display_name=wanted.display_name,
        project_ids=wanted.project_ids,
        user_metadata=wanted.user_metadata,
        statuses=None if statuses is None else [SessionStatus(each.type, each.reasons) for each in statuses],
        after=None
        if cursor is None
        else SearchPosition(cursor.last_created_at.timestamp(), cursor.last_session_id),
    )


def _answer(found: Sequence[SessionMatch], limit: int, urn: str) -> SessionSearchResponse:
    """`found` has one more than `limit` when there is another page."""
    page = found[:limit]
    last = page[-1] if len(found) > limit else None
    return SessionSearchResponse(
        sessions=[_summary(each, urn) for each in page],
        next_cursor=last
        and SearchCursor(last_created_at=utc(last.created_at), last_session_id=last.session_id),
    )


def _summary(found: SessionMatch, urn: str) -> SessionSummary:
    return SessionSummary(
        session_id=found.session_id,
        created_at=utc(found.created_at),
        owner=urn,
        project_id=found.project_id,
        status=_status(found),
        checkpoints_count=found.checkpoints,
        checkpoint_storage_bytes=found.checkpoint_bytes,
        display_name=found.display_name,
        user_metadata=as_strings(found.user_metadata),
    )


def _status(found: SessionMatch) -> ActiveStatus | FinishedStatus | None:
    if found.finished_at is None:
        return ActiveStatus()
    for reason in session_listing.REASONS:
        if reason == found.finish_reason:
            return FinishedStatus(reason=FinishedReason(type=reason), detail=found.finish_detail)
    return None
