"""Sessions: lists, contents, search, assignment to projects."""

from collections.abc import Iterator
from typing import Annotated

from fastapi import APIRouter, Query, Request
from sqlalchemy import Connection
from starlette.responses import Response

from skyrl_tinker.api.openapi.documents import takes
from skyrl_tinker.api.requests.request_body import read_model
from skyrl_tinker.api.requests.responses import json_from_rows
from skyrl_tinker.api.security.tokens import user_urn
from skyrl_tinker.api.services import Deps, Owner, Reached
from skyrl_tinker.domain.ids import SessionId
from skyrl_tinker.domain.units import MiB
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
from skyrl_tinker.store.database.rows import AnyRow
from skyrl_tinker.store.reports import session_listing

_PAGE_CHARACTERS = 4 * MiB
"""Metadata of a page of a search, after which another one begins."""

router = APIRouter(tags=["sessions"], prefix="/sessions")


@router.get("", summary="The ids of your sessions, newest first")
async def list_sessions(
    query: Annotated[SessionsQuery, Query()], deps: Deps, reach: Reached
) -> SessionsResponse:
    ids = await deps.store.report(
        lambda conn: session_listing.list_ids(conn, reach, query.limit, query.offset), reach
    )
    return SessionsResponse(sessions=ids)


@router.post(
    "/search",
    response_model=SessionSearchResponse,
    **takes("Search your sessions by metadata, name, project and status", SessionSearchRequest),
)
async def search_sessions(request: Request, deps: Deps, reach: Reached, owner: Owner) -> Response:
    message = await read_model(request, SessionSearchRequest)

    def read(conn: Connection) -> SessionSearchResponse:
        seen = owner if message.owner.type == "own" else reach
        names = _names(message.owner)
        matches = session_listing.search(conn, seen, message, names, message.limit + 1)
        return _page(matches, message.limit)

    return await json_from_rows(deps.store, reach, read)


@router.get(
    "/{session_id}", summary="Training runs and samplers of a session", response_model=SessionContents
)
async def get_session(
    session_id: str, query: Annotated[SessionQuery, Query()], deps: Deps, reach: Reached
) -> Response:
    return await json_from_rows(
        deps.store, reach, lambda conn: session_listing.contents(conn, reach, SessionId(session_id))
    )


@router.put(
    "/{session_id}/project",
    **takes("Move a session, with everything that it made, into a project", SetProjectRequest),
)
async def set_project(session_id: str, request: Request, deps: Deps, owner: Owner) -> dict[str, str]:
    """Projects need not be created: a project is any id that a session names."""
    project = (await read_model(request, SetProjectRequest)).project_id
    await deps.store.write(
        lambda conn: session_listing.set_project(conn, owner, SessionId(session_id), project)
    )
    return {}


def _names(searched: SearchOwner) -> list[str] | None:
    """Return the names in the URNs; those of another form name nobody here."""
    users = user_urn("")
    if searched.type != "user":
        return None
    return [urn.removeprefix(users) for urn in searched.owner_urns if urn.startswith(users)]


def _page(matches: Iterator[AnyRow], limit: int) -> SessionSearchResponse:
    """Return the first `limit` matches, or less where their metadata is long, and where others follow."""
    page, size = list[SessionSummary](), 0
    for match in matches:
        if len(page) == limit or size >= _PAGE_CHARACTERS:
            last = SearchCursor(last_created_at=page[-1].created_at, last_session_id=page[-1].session_id)
            return SessionSearchResponse(sessions=page, next_cursor=last)
        page.append(_summary(match))
        size += sum(len(name) + len(value) for name, value in page[-1].user_metadata.items())
    return SessionSearchResponse(sessions=page)


def _summary(match: AnyRow) -> SessionSummary:
    told = {"owner": user_urn(match.owner), "status": _status(match)}
    return SessionSummary(**{**match._mapping, **told})


def _status(match: AnyRow) -> ActiveStatus | FinishedStatus | None:
    if match.finished_at is None:
        return ActiveStatus()
    if match.finish_reason not in session_listing.REASONS:
        return None
    return FinishedStatus(reason=FinishedReason(type=match.finish_reason), detail=match.finish_detail)
