"""Sessions as REST shows them: listed, looked into, put into projects."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from skyrl_tinker.domain.ids import OwnerId, SessionId
from skyrl_tinker.errors import NotFoundError
from skyrl_tinker.store import audit_log
from skyrl_tinker.store.database.tables import Model, SamplingSession, Session
from skyrl_tinker.store.owners import owned_by, require_session


@dataclass(frozen=True, slots=True)
class SessionTotals:
    """What a session has made."""

    training_runs: list[str]
    samplers: list[str]
    user_metadata: Mapping[str, Any]
    display_name: str | None


@dataclass(frozen=True, slots=True)
class Labels:
    project_id: str | None
    user_metadata: Mapping[str, Any]


async def page(conn: AsyncConnection, owner: OwnerId | None, limit: int, offset: int) -> list[str]:
    """Ids, newest first."""
    query = select(Session.session_id).where(owned_by(owner))
    query = query.order_by(Session.created_at.desc(), Session.session_id.desc()).limit(limit).offset(offset)
    return list(await conn.scalars(query))


async def contents(conn: AsyncConnection, owner: OwnerId | None, session_id: SessionId) -> SessionTotals:
    """NotFoundError if this owner has no such session."""
    query = select(Session.user_metadata, Session.display_name)
    row = (await conn.execute(query.where(Session.session_id == session_id, owned_by(owner)))).one_or_none()
    if row is None:
        raise NotFoundError(f"no session {session_id}")
    runs = select(Model.model_id).where(Model.session_id == session_id).order_by(Model.key)
    samplers = (
        select(SamplingSession.sampling_session_id)
        .where(SamplingSession.session_id == session_id)
        .order_by(SamplingSession.created_at, SamplingSession.sampling_session_seq_id)
    )
    return SessionTotals(
        list(await conn.scalars(runs)),
        list(await conn.scalars(samplers)),
        row.user_metadata,
        row.display_name,
    )


async def labels(conn: AsyncConnection, owner: OwnerId | None, wanted: Collection[str]) -> dict[str, Labels]:
    """By session id, of those that are this owner's."""
    query = select(Session.session_id, Session.project_id, Session.user_metadata).where(owned_by(owner))
    rows = await conn.execute(query)
    return {id_: Labels(project, metadata) for id_, project, metadata in rows if id_ in wanted}


async def set_project(
    conn: AsyncConnection, owner: OwnerId | None, session_id: SessionId, project_id: str
) -> None:
    """With all that the session has made. NotFoundError if this owner has no such session."""
    await require_session(conn, owner, session_id)
    await conn.execute(update(Session).where(Session.session_id == session_id).values(project_id=project_id))
    await audit_log.record(conn, session_id, "project_session_add", project_id=project_id)
