"""Training requests that are on their way, for the engine: being received, or lost and tried again soon.

Notes of API processes here hold for a while even if they die. It lies in one row, without entries that are
over.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, select

from skyrl_tinker.domain.ids import ModelId, ModelKey, OwnerId
from skyrl_tinker.store import server_state
from skyrl_tinker.store.database.rows import database_time
from skyrl_tinker.store.database.tables import Model, Session
from skyrl_tinker.store.session_records import HELD

RETRY_S = 20.0
"""Time in which a client has tried a lost request again: the SDK waits 10 s at most, and 16 s after four
rounds of retries in vain, each of which is noted anew."""
OUTAGE_S = 60.0
"""Time in which API processes are back, and clients have tried again."""


@dataclass(frozen=True, slots=True)
class Sender:
    """Sender of a request: one of a model, or where `model_id` is None of any of the owner's."""

    owner: OwnerId | None
    model_id: ModelId | None


def note(conn: Connection, until: Mapping[Sender, float]) -> None:
    """Expect requests of these senders until then, UTC seconds. Models that the owner does not have: none."""
    keys = {_key(conn, sender): at for sender, at in until.items()}
    _note(conn, {key: at for key, at in keys.items() if key is not None})


def note_outage(conn: Connection) -> None:
    """Expect requests of every live model: clients may have sent some while API processes were away."""
    live = conn.scalars(select(Model.key).where(Model.state.in_(HELD)))
    _note(conn, dict.fromkeys(map(_of_model, live), database_time(conn) + OUTAGE_S))


def expected(conn: Connection, model: ModelKey, owner: OwnerId | None, now: float) -> tuple[bool, bool]:
    """Return whether a request of this model is on its way, and whether one of its owner may be of it."""
    until = _read(conn)
    of_model, of_owner = (until.get(key, 0.0) > now for key in (_of_model(model), _of_owner(owner)))
    return of_model, of_owner


def _note(conn: Connection, until: Mapping[str, float]) -> None:
    now = database_time(conn)
    noted = {key: at for key, at in _read(conn).items() if at > now}
    later = {key: max(at, noted.get(key, 0.0)) for key, at in until.items()}
    server_state.put(conn, server_state.EXPECTED, noted | later)


def _read(conn: Connection) -> dict[str, float]:
    value: Any = server_state.get(conn, server_state.EXPECTED)
    return value or {}


def _key(conn: Connection, sender: Sender) -> str | None:
    if sender.model_id is None:
        return _of_owner(sender.owner)
    query = select(Model.key).join(Session, Session.session_id == Model.session_id)
    found = query.where(
        Model.model_id == sender.model_id, Session.owner_id.is_not_distinct_from(sender.owner)
    )
    key = conn.scalar(found)
    return None if key is None else _of_model(key)


def _of_model(key: int) -> str:
    return f"model {key}"


def _of_owner(owner: OwnerId | None) -> str:
    return f"owner {owner}"
