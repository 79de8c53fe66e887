"""Ownership of rows. Sessions have an owner; models, samplers, futures and checkpoints a session."""

from collections.abc import Sequence

from sqlalchemy import ColumnElement, Connection, bindparam, func, select, true, update

from skyrl_tinker.domain.ids import ALL_OWNERS, OwnerId, Reach, SessionId
from skyrl_tinker.errors import found
from skyrl_tinker.store.database.tables import ApiKey, Session

LOCAL_OWNER = "local"
"""Name of the owner of all rows on a server without keys."""
OWNER_NAME: ColumnElement[str] = func.coalesce(ApiKey.name, LOCAL_OWNER)
"""Name of the owner, in a query that outer-joins ApiKey to Session.owner_id."""


def name_of(conn: Connection, owner: OwnerId | None) -> str:
    """Return the name of the owner's key, also of one that has ended."""
    return conn.scalar(select(ApiKey.name).where(ApiKey.id == owner)) or LOCAL_OWNER


def owned_by(owner: OwnerId | None) -> ColumnElement[bool]:
    """Return SQL: the joined session is this owner's."""
    return Session.owner_id.is_not_distinct_from(owner)


def within(reach: Reach) -> ColumnElement[bool]:
    """Return SQL: the joined session is of an owner whose work the caller sees."""
    return true() if reach is ALL_OWNERS else owned_by(reach)


def reaches(reach: Reach, owner: OwnerId | None) -> bool:
    return reach is ALL_OWNERS or reach == owner


OWNED = Session.owner_id.is_not_distinct_from(bindparam("owner"))
"""The condition of `owned_by`, with a parameter, for statements that are built once."""


NO_PROJECT = "default"
"""Project of sessions without one. Any name is a project as soon as a session has it."""


def in_project(project_ids: Sequence[str]) -> ColumnElement[bool]:
    """Return SQL: the joined session is in one of these projects."""
    return func.coalesce(Session.project_id, NO_PROJECT).in_(project_ids)


def require_session(conn: Connection, reach: Reach, session_id: SessionId) -> None:
    """Raise NotFoundError if the caller sees no such session."""
    query = select(Session.session_id).where(Session.session_id == session_id, within(reach))
    found(conn.scalar(query), f"no session {session_id}")


def count_ownerless(conn: Connection) -> int:
    """Return how many sessions were created without a key."""
    return conn.scalar(select(func.count()).where(Session.owner_id.is_(None))) or 0


def give(conn: Connection, former: OwnerId | None, heir: OwnerId) -> int:
    """Give all sessions of an owner to another one. Returns how many."""
    return conn.execute(update(Session).where(owned_by(former)).values(owner_id=heir)).rowcount
