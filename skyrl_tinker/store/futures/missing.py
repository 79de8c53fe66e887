"""Numbers of a model that no request came for: failed futures, so that later requests need not wait.

A request that comes too late gets that failure.
"""

from collections.abc import Callable

from sqlalchemy import Connection, select

from skyrl_tinker.domain.ids import ModelKey, ModelState, RequestKind
from skyrl_tinker.domain.values import Failure
from skyrl_tinker.store.database.tables import Future, Model
from skyrl_tinker.store.futures import finish
from skyrl_tinker.store.futures.record import NewFuture, insert_future

_LIVE = (ModelState.CREATING, ModelState.READY)


def fail_missing(
    conn: Connection, model: ModelKey, seq_ids: range, failure: Callable[[int], Failure]
) -> list[int]:
    """Fail those of a live model's numbers that have no request; returns them. `failure`: by seq_id."""
    live = select(Model.session_id).where(Model.key == model, Model.state.in_(_LIVE))
    session = conn.scalar(live)
    if session is None:
        return []
    of_model = Future.model_key == model
    there = select(Future.seq_id).where(of_model, Future.seq_id.between(seq_ids.start, seq_ids.stop - 1))
    missing = sorted(set(seq_ids).difference(conn.scalars(there)))
    for seq_id in missing:
        new = NewFuture(RequestKind.MISSING, seq_id, b"", session, model_key=model)
        future_id, _ = insert_future(conn, new, None)
        finish.fail(conn, future_id, failure(seq_id))
    return missing
