"""Holdings of owners at the moment: for the limits of their keys, and their sums for the administrator."""

from collections import defaultdict
from typing import Any

from sqlalchemy import Connection, Select, func, select, text

from skyrl_tinker.domain.bases import Bases
from skyrl_tinker.domain.ids import ALL_OWNERS, ModelState, OwnerId, RequestKind, SessionId
from skyrl_tinker.domain.state_size import state_bytes
from skyrl_tinker.domain.values import Usage
from skyrl_tinker.protocol.schemas.administration import OwnedNow
from skyrl_tinker.store import usage_records
from skyrl_tinker.store.checkpoint_records import is_live
from skyrl_tinker.store.database.rows import total
from skyrl_tinker.store.database.tables import Future, Model, SavedCheckpoint, Session
from skyrl_tinker.store.model_records import spec_from_row
from skyrl_tinker.store.owners import owned_by

HOURS = 24
"""Hours of tokens, the current one included."""
NOTHING = OwnedNow(**dict.fromkeys(OwnedNow.model_fields, 0))
_PENDING = text("futures.status = 'pending'")  # literally so, for the index of pending ones


def open_sessions(conn: Connection, owner: OwnerId | None) -> list[SessionId]:
    """Return the sessions, the one without a heartbeat for longest first."""
    return _quietest_first(conn, _open(Session.session_id), owner)


def sessions_in_training(conn: Connection, owner: OwnerId | None) -> list[SessionId]:
    """Return the session of each model in training, the one without a heartbeat for longest first."""
    return _quietest_first(conn, _training(Session.session_id), owner)


def resident_bytes(conn: Connection, owner: OwnerId | None, bases: Bases) -> int:
    """Return the bytes of state of the models in training on `bases`."""
    columns = (Model.lora_rank, Model.seed, Model.train_mlp, Model.train_attn, Model.train_unembed)
    query = _training(Model.base_model, *columns, Model.optimizer_config).where(owned_by(owner))
    return sum(
        state_bytes(facts, spec_from_row(row), row.optimizer_config["type"])
        for row in conn.execute(query)
        if (facts := bases.find(row.base_model))
    )


def stored_bytes(conn: Connection, owner: OwnerId | None) -> int:
    """Return the bytes of the live checkpoints."""
    query = _stored(conn, total(SavedCheckpoint.size_bytes)).where(owned_by(owner))
    return int(conn.scalar(query) or 0)


def pending_requests(conn: Connection) -> dict[OwnerId | None, int]:
    """Return the number of requests that have not finished, of each owner that has any."""
    query = select(func.count()).join_from(Future, Session, Session.session_id == Future.session_id)
    return {owner: count for owner, (count,) in _by_owner(conn, query.where(_PENDING)).items()}


def totals_by_owner(conn: Connection, now: float) -> dict[OwnerId | None, OwnedNow]:
    """Return the sums of all owners that have any; None is the owner of work done without a key."""
    sums: dict[OwnerId | None, dict[str, int]] = defaultdict(dict)
    for names, query in (
        (("sessions",), _open(func.count())),
        (("models",), _training(func.count())),
        (("checkpoints", "stored_bytes"), _stored(conn, func.count(), total(SavedCheckpoint.size_bytes))),
    ):
        for owner, values in _by_owner(conn, query).items():
            sums[owner].update(zip(names, values, strict=True))
    for owner, usage in _tokens(conn, now).items():
        sums[owner].update(usage)
    return {owner: NOTHING.model_copy(update=values) for owner, values in sums.items()}


def _open(*columns: Any) -> Select[Any]:
    return select(*columns).select_from(Session).where(Session.finished_at.is_(None))


def _training(*columns: Any) -> Select[Any]:
    query = select(*columns).join_from(Model, Session, Session.session_id == Model.session_id)
    return query.where(Model.state.in_((ModelState.CREATING, ModelState.READY)))


def _stored(conn: Connection, *columns: Any) -> Select[Any]:
    query = select(*columns).join_from(SavedCheckpoint, Model, Model.key == SavedCheckpoint.model_key)
    return query.join(Session, Session.session_id == Model.session_id).where(*is_live(conn))


def _quietest_first(conn: Connection, query: Select[Any], owner: OwnerId | None) -> list[SessionId]:
    rows = conn.scalars(query.where(owned_by(owner)).order_by(Session.last_heartbeat_at))
    return [SessionId(session) for session in rows]


def _by_owner(conn: Connection, query: Select[Any]) -> dict[OwnerId | None, list[int]]:
    rows = conn.execute(query.add_columns(Session.owner_id).group_by(Session.owner_id))
    return {None if owner is None else OwnerId(owner): values for *values, owner in rows}


def _tokens(conn: Connection, now: float) -> dict[OwnerId | None, dict[str, int]]:
    end = int(now // usage_records.HOUR_S) + 1
    used = usage_records.hourly_between(conn, ALL_OWNERS, end - HOURS, end)
    sessions = {each.session_id for each in used}
    rows = conn.execute(select(Session.session_id, Session.owner_id).where(Session.session_id.in_(sessions)))
    owners = {session: None if owner is None else OwnerId(owner) for session, owner in rows}
    sampled: dict[OwnerId | None, Usage] = defaultdict(Usage)
    trained: dict[OwnerId | None, Usage] = defaultdict(Usage)
    for each in used:
        kind = sampled if each.kind is RequestKind.SAMPLE else trained
        kind[owners[each.session_id]] += each.usage
    return {
        owner: {
            "trained_tokens": trained[owner].input_tokens,
            "prompt_tokens": sampled[owner].input_tokens,
            "sampled_tokens": sampled[owner].output_tokens,
        }
        for owner in {*sampled, *trained}
    }
