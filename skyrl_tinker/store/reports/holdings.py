"""Holdings of owners at the moment, for the limits of their keys."""

from typing import Any

from sqlalchemy import Connection, func, select, text

from skyrl_tinker.domain.bases import Bases
from skyrl_tinker.domain.ids import ModelState, OwnerId, SessionId
from skyrl_tinker.domain.state_size import state_bytes
from skyrl_tinker.store.checkpoint_records import is_live
from skyrl_tinker.store.database.rows import total
from skyrl_tinker.store.database.tables import Future, Model, SavedCheckpoint, Session
from skyrl_tinker.store.model_records import spec_from_row
from skyrl_tinker.store.owners import owned_by

_PENDING = text("futures.status = 'pending'")  # literally so, for the index of pending ones
_TRAINING = (ModelState.CREATING, ModelState.READY)


def open_sessions(conn: Connection, owner: OwnerId | None) -> list[SessionId]:
    """Return the sessions, the one without a heartbeat for longest first."""
    query = select(Session.session_id).where(owned_by(owner), Session.finished_at.is_(None))
    return _sessions(conn, query)


def sessions_in_training(conn: Connection, owner: OwnerId | None) -> list[SessionId]:
    """Return the session of each model in training, the one without a heartbeat for longest first."""
    return _sessions(conn, _models(owner, Session.session_id))


def resident_bytes(conn: Connection, owner: OwnerId | None, bases: Bases) -> int:
    """Return the bytes of state of the models in training on `bases`."""
    columns = (Model.lora_rank, Model.seed, Model.train_mlp, Model.train_attn, Model.train_unembed)
    rows = conn.execute(_models(owner, Model.base_model, *columns, Model.optimizer_config))
    return sum(
        state_bytes(facts, spec_from_row(row), row.optimizer_config["type"])
        for row in rows
        if (facts := bases.find(row.base_model))
    )


def stored_bytes(conn: Connection, owner: OwnerId | None) -> int:
    """Return the bytes of the live checkpoints."""
    query = (
        select(func.coalesce(total(SavedCheckpoint.size_bytes), 0))
        .join(Model, Model.key == SavedCheckpoint.model_key)
        .join(Session, Session.session_id == Model.session_id)
        .where(owned_by(owner), *is_live(conn))
    )
    return int(conn.scalar(query) or 0)


def pending_requests(conn: Connection) -> dict[OwnerId | None, int]:
    """Return the number of requests that have not finished, of each owner that has any."""
    query = (
        select(Session.owner_id, func.count())
        .select_from(Future)
        .join(Session, Session.session_id == Future.session_id)
        .where(_PENDING)
        .group_by(Session.owner_id)
    )
    return {None if owner is None else OwnerId(owner): count for owner, count in conn.execute(query)}


def _models(owner: OwnerId | None, *columns: Any) -> Any:
    query = select(*columns).select_from(Model).join(Session, Session.session_id == Model.session_id)
    return query.where(owned_by(owner), Model.state.in_(_TRAINING))


def _sessions(conn: Connection, query: Any) -> list[SessionId]:
    return [SessionId(session) for session in conn.scalars(query.order_by(Session.last_heartbeat_at))]
