"""Purge of a key's remaining work, at an administrator's word."""

from typing import Any

from sqlalchemy import Connection, exists, select, update

from skyrl_tinker.domain.ids import SessionId
from skyrl_tinker.store import api_keys, audit_log, checkpoint_records, session_records
from skyrl_tinker.store.checkpoint_records import WITH_MODEL, checkpoint_from_row
from skyrl_tinker.store.database.tables import Model, SavedCheckpoint, Session
from skyrl_tinker.store.owners import owned_by

REASON = "purged"
_LONG_AGO = 0.0
_UNNAMED: dict[str, Any] = {"tags": [], "display_name": None, "project_id": None}


def purge_key(conn: Connection, former: str) -> tuple[int, int]:
    """End the sessions of a revoked or expired key, given by id or name, and delete its checkpoints.

    Metadata goes at once, files and rows when the engine next looks for files to remove; the rows of a
    session whose models are in training still like those of any that ends now. Returns the numbers of
    sessions and checkpoints. Raises NotFoundError, and UserError if the key is live, or if several
    had the name.
    """
    owner = api_keys.find_dead(conn, former).id
    sessions = [SessionId(each) for each in conn.scalars(select(Session.session_id).where(owned_by(owner)))]
    for session in sessions:
        session_records.finish(conn, session, REASON, None)
    saved = WITH_MODEL.where(owned_by(owner), *checkpoint_records.is_live(conn))
    checkpoints = [checkpoint_from_row(conn, row) for row in conn.execute(saved)]
    for checkpoint in checkpoints:
        checkpoint_records.delete(conn, checkpoint)
    of_owner = select(Session.session_id).where(owned_by(owner))
    models = select(Model.key).where(Model.session_id.in_(of_owner))
    bare: dict[str, Any] = {"user_metadata": {}}
    conn.execute(update(SavedCheckpoint).where(SavedCheckpoint.model_key.in_(models)).values(bare))
    conn.execute(update(Model).where(Model.session_id.in_(of_owner)).values(bare))
    conn.execute(update(Session).where(owned_by(owner)).values({**bare, **_UNNAMED}))
    trains = exists().where(Model.session_id == Session.session_id, Model.state.in_(session_records.HELD))
    conn.execute(update(Session).where(owned_by(owner), ~trains).values(finished_at=_LONG_AGO))
    counts = {"sessions": len(sessions), "checkpoints": len(checkpoints)}
    audit_log.record_key(conn, "key_purge", owner, by=None, **counts)
    return len(sessions), len(checkpoints)
