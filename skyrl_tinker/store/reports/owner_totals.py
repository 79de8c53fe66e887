"""Sums of each owner's holdings, for the administrator."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from sqlalchemy import Connection, func, select

from skyrl_tinker.domain.ids import ALL_OWNERS, ModelState, OwnerId, RequestKind
from skyrl_tinker.domain.values import Usage
from skyrl_tinker.protocol.schemas.administration import OwnedNow
from skyrl_tinker.store import usage_records
from skyrl_tinker.store.checkpoint_records import is_live
from skyrl_tinker.store.database.rows import total
from skyrl_tinker.store.database.tables import Model, SavedCheckpoint, Session

HOURS = 24
"""Hours of tokens, the current one included."""
NOTHING = OwnedNow(**dict.fromkeys(OwnedNow.model_fields, 0))


def totals_by_owner(conn: Connection, now: float) -> dict[OwnerId | None, OwnedNow]:
    """Return the sums of all owners that have any; None is the owner of work done without a key."""
    sums: dict[OwnerId | None, dict[str, int]] = defaultdict(dict)
    for names, rows in (
        (("sessions",), _open_sessions(conn)),
        (("models",), _models(conn)),
        (("checkpoints", "stored_bytes"), _checkpoints(conn)),
    ):
        for owner, *values in rows:
            sums[owner].update(zip(names, values, strict=True))
    for owner, usage in _tokens(conn, now).items():
        sums[owner].update(usage)
    return {owner: NOTHING.model_copy(update=values) for owner, values in sums.items()}


def _open_sessions(conn: Connection) -> Iterable[Any]:
    query = select(Session.owner_id, func.count()).where(Session.finished_at.is_(None))
    return conn.execute(query.group_by(Session.owner_id))


def _models(conn: Connection) -> Iterable[Any]:
    training = Model.state.in_((ModelState.CREATING, ModelState.READY))
    query = select(Session.owner_id, func.count()).join(Model, Model.session_id == Session.session_id)
    return conn.execute(query.where(training).group_by(Session.owner_id))


def _checkpoints(conn: Connection) -> Iterable[Any]:
    query = (
        select(Session.owner_id, func.count(), total(SavedCheckpoint.size_bytes))
        .join(Model, Model.session_id == Session.session_id)
        .join(SavedCheckpoint, SavedCheckpoint.model_key == Model.key)
        .where(*is_live(conn))
    )
    return conn.execute(query.group_by(Session.owner_id))


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
