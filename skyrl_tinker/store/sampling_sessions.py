"""Sampling sessions. Each holds the version that it samples from until it is finished, as expired ones are.

It is pinned to its version, or, if that version is inflight, follows the newest inflight version of the same
model.
"""

from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, bindparam, insert, select, update

from skyrl_tinker.domain.ids import (
    ALL_OWNERS,
    ModelKey,
    ModelState,
    OwnerId,
    Reach,
    SamplingSessionId,
    SessionId,
    VersionId,
)
from skyrl_tinker.errors import SeqIdReusedError, found
from skyrl_tinker.store import session_records
from skyrl_tinker.store.database.prepared import Prepared
from skyrl_tinker.store.database.rows import AnyRow, as_row, database_time
from skyrl_tinker.store.database.tables import AdapterVersion, Model, SamplingSession, Session
from skyrl_tinker.store.owners import OWNED


@dataclass(frozen=True, slots=True)
class SamplingSessionRow:
    """Recorded sampling session.

    `version_id`: given at creation, None for the base model. `follows`: the model whose newest inflight
    version, at least `version_id`, is sampled instead.
    """

    sampling_session_id: SamplingSessionId
    session_id: SessionId
    sampling_session_seq_id: int
    base_model: str
    model_path: str | None
    version_id: VersionId | None
    follows: ModelKey | None = None


def create(
    conn: Connection,
    session_id: SessionId,
    sampling_session_seq_id: int,
    *,
    base_model: str,
    model_path: str | None,
    version_id: VersionId | None,
) -> SamplingSessionId:
    """Create a sampling session; a repeated request gets the same id.

    Raises SeqIdReusedError if the seq id has another target, NotFoundError (no session), GoneError.
    """
    new_id = _id(session_id, sampling_session_seq_id)
    new = SamplingSessionRow(new_id, session_id, sampling_session_seq_id, base_model, model_path, version_id)
    if (first := get(conn, new_id)) is not None:
        _require_same_target(first, new)
        return new_id
    session_records.require_live(conn, session_id)
    row = {**asdict(new), "created_at": database_time(conn)}
    del row["follows"]
    conn.execute(insert(SamplingSession).values(row))
    return new_id


def find_for_path(
    conn: Connection, session_id: SessionId, sampling_session_seq_id: int, model_path: str
) -> SamplingSessionId | None:
    """Return the session that an earlier copy of this request created, even if the checkpoint is gone."""
    first = get(conn, _id(session_id, sampling_session_seq_id))
    return first.sampling_session_id if first and first.model_path == model_path else None


def find(conn: Connection, reach: Reach, sampling_session_id: SamplingSessionId) -> SamplingSessionRow | None:
    """Return a sampling session that the caller sees, None if there is none of this id."""
    if reach is ALL_OWNERS:
        return get(conn, sampling_session_id)
    return _found(_OF_OWNER.row(conn, {"of": sampling_session_id, "owner": reach}))


def require(conn: Connection, reach: Reach, sampling_session_id: SamplingSessionId) -> SamplingSessionRow:
    """Return a sampling session that the caller sees. Raises NotFoundError."""
    return found(find(conn, reach, sampling_session_id), f"no sampling session {sampling_session_id}")


def get(conn: Connection, sampling_session_id: SamplingSessionId) -> SamplingSessionRow | None:
    return _found(_BY_ID.row(conn, {"of": sampling_session_id}))


_QUERY = (
    select(SamplingSession.__table__, AdapterVersion.inflight, AdapterVersion.model_key)
    .join(Session, Session.session_id == SamplingSession.session_id)
    .outerjoin(AdapterVersion, AdapterVersion.id == SamplingSession.version_id)
    .where(SamplingSession.sampling_session_id == bindparam("of"))
)
_BY_ID, _OF_OWNER = Prepared(_QUERY), Prepared(_QUERY.where(OWNED))


def _found(row: AnyRow | None) -> SamplingSessionRow | None:
    if row is None:
        return None
    return as_row(SamplingSessionRow, row, follows=row.model_key if row.inflight else None)


def add_client(conn: Connection, owner: OwnerId | None, sampling_session_id: SamplingSessionId) -> int:
    """Return a number that no other client of this sampling session has, from 1 on.

    Raises NotFoundError (no sampling session), GoneError (session finished).
    """
    session_records.require_live(conn, require(conn, owner, sampling_session_id).session_id)
    joined = (
        update(SamplingSession)
        .where(SamplingSession.sampling_session_id == sampling_session_id)
        .values(clones=SamplingSession.clones + 1)
        .returning(SamplingSession.clones)
    )
    return int(conn.execute(joined).scalar_one())


def _id(session_id: SessionId, sampling_session_seq_id: int) -> SamplingSessionId:
    return SamplingSessionId(f"{session_id}:sample:{sampling_session_seq_id}")


def _require_same_target(first: SamplingSessionRow, new: SamplingSessionRow) -> None:
    """Raise SeqIdReusedError for another target; an overwritten checkpoint is the same target."""
    if first.base_model != new.base_model:
        differs = f"base_model {first.base_model!r}", repr(new.base_model)
    elif first.model_path != new.model_path:
        differs = f"model_path {first.model_path!r}", repr(new.model_path)
    elif first.model_path is None and first.version_id != new.version_id:
        differs = f"weight version {first.version_id}", str(new.version_id)
    else:
        return
    raise SeqIdReusedError(
        f"sampling_session_seq_id {first.sampling_session_seq_id} of session {first.session_id} "
        f"was used with {differs[0]}, now {differs[1]}"
    )


def is_held(version_id: Any) -> ColumnElement[bool]:
    """Return SQL: a sampling session of a live session was created on this version column."""
    return (
        select(SamplingSession.sampling_session_id)
        .join(Session, Session.session_id == SamplingSession.session_id)
        .where(SamplingSession.version_id == version_id, Session.finished_at.is_(None))
        .exists()
    )


def why_parked(conn: Connection, session: SamplingSessionId) -> str | None:
    """Return why the model of a sampling client's unnamed weights is parked, None if it is not."""
    query = (
        select(Model.state_reason)
        .join(AdapterVersion, AdapterVersion.model_key == Model.key)
        .join(SamplingSession, SamplingSession.version_id == AdapterVersion.id)
        .where(
            SamplingSession.sampling_session_id == session,
            AdapterVersion.durable.is_(False),
            Model.state == ModelState.PARKED,
        )
    )
    return conn.scalar(query)
