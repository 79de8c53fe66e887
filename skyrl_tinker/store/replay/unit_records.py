"""Units of work that training requests ran in, as replay reads them; `finish` records them."""

from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    and_,
    bindparam,
    delete,
    func,
    literal_column,
    or_,
    select,
)

from skyrl_tinker.domain.ids import SAVES, Effect, FutureStatus, ModelKey, ModelState, RequestKind
from skyrl_tinker.domain.units import MiB
from skyrl_tinker.store.database.prepared import Prepared
from skyrl_tinker.store.database.rows import as_row
from skyrl_tinker.store.database.tables import Future, Model, Request, Session, Snapshot
from skyrl_tinker.store.futures.queue import IN_WINDOW, QueuedRow, window_failure
from skyrl_tinker.store.session_records import HELD

KEPT, KEPT_BYTES = 32, 16 * MiB
"""Bodies of a model's newest passes that no replay needs, and that stay so that their tokens can be read: so
many, and together so large at most. The SDK divides a batch into passes of 5 MB.
"""
SLICE = 200
"""Bodies deleted in one transaction: other writers wait meanwhile."""
_PASSES = (RequestKind.FORWARD, RequestKind.FORWARD_BACKWARD)
_RESETS = (Effect.STEP, Effect.CLEARED, Effect.LOADED)  # after them there are no gradients


@dataclass(frozen=True, slots=True)
class RanRow:
    """Training request that ran in `unit`, in rows of `row_budget` tokens if it is a pass."""

    row: QueuedRow
    unit: int
    effect: Effect | None
    row_budget: int | None


_RAN = (
    select(
        Future.id,
        Future.request_id,
        Future.kind,
        Future.session_id,
        Session.owner_id,
        Future.seq_id,
        Future.status,
        Future.created_at,
        Future.unit,
        Future.effect,
        Future.row_budget,
        func.coalesce(func.length(Request.body), 0).label("body_bytes"),
    )
    .join(Session, Session.session_id == Future.session_id)
    .outerjoin(Request, Request.future_id == Future.id)
    .where(Future.model_key == bindparam("model_key"), Future.seq_id > bindparam("after"))
    .where(Future.unit.is_not(None), or_(Future.effect.is_not(None), Future.kind.in_(SAVES)))
    .order_by(Future.seq_id)
)


def ran_after(conn: Connection, model: ModelKey, seq_id: int) -> list[RanRow]:
    """Return the requests of this model after `seq_id` that a replay repeats, in order: effects and saves."""
    found = conn.execute(_RAN, {"model_key": model, "after": seq_id})
    return [
        as_row(RanRow, row, row=as_row(QueuedRow, row, model_key=model, sampling_session_id=None))
        for row in found
    ]


def replayed_from(conn: Connection, finished_before: float) -> dict[ModelKey, int]:
    """Return the seq_id from which a replay begins, of each model in training whose oldest request is so old.

    Not counting its creation.
    """
    position = func.coalesce(Snapshot.seq_id, 0)
    behind = select(Future.finished_at).where(Future.model_key == Model.key, Future.seq_id > 0)
    oldest = behind.order_by(Future.seq_id).limit(1).scalar_subquery()
    query = select(Model.key, position).outerjoin(Snapshot, Snapshot.model_key == Model.key)
    rows = conn.execute(query.where(Model.state.in_(HELD), oldest < finished_before))
    return {ModelKey(model): seq_id for model, seq_id in rows}


def next_seq(conn: Connection, model: ModelKey) -> int:
    """Return the seq_id behind the last request that ran."""
    last = _LAST_RAN.row(conn, {"of": model})
    return 0 if last is None else last.seq_id + 1


def next_unit(conn: Connection) -> int:
    """Return a number above those of all units that a replay may repeat."""
    last = [_LAST_RAN.row(conn, {"of": model}) for model in conn.scalars(_LIVE)]
    return max((row.unit + 1 for row in last if row is not None), default=0)


def window_error(conn: Connection, model: ModelKey) -> str | None:
    """Return why the gradients since the last step are invalid: the first of IN_WINDOW that failed."""
    reset = conn.execute(_LAST_RESET, {"of": model}).one_or_none()
    after = 0 if reset is None else reset.seq_id
    window = {"of": model, "after": after, "until": next_seq(conn, model)}
    row = conn.execute(_WINDOW_ERROR, window).one_or_none()
    if row is None:
        return None
    return window_failure(row.kind, row.seq_id, "was refused" if row.unit is None else "failed", row.error)


def _last(condition: ColumnElement[bool]) -> Select[*tuple[Any, ...]]:
    """Return the query of seq_id and unit of a model's last request for which this holds: near its end."""
    query = select(Future.seq_id, Future.unit).where(_OF_MODEL, condition)
    return query.order_by(Future.seq_id.desc()).limit(1)


_OF_MODEL = Future.model_key == bindparam("of")
_LAST_RAN, _LAST_RESET = Prepared(_last(Future.unit.is_not(None))), _last(Future.effect.in_(_RESETS))
_LIVE = select(Model.key).where(Model.state.in_((ModelState.READY, ModelState.PARKED)))
_WINDOW_ERROR = (
    select(Future.seq_id, Future.kind, Future.error, Future.unit)
    .where(_OF_MODEL, Future.seq_id > bindparam("after"), Future.seq_id < bindparam("until"))
    .where(Future.kind.in_(IN_WINDOW), Future.status == FutureStatus.FAILED)
    .order_by(Future.seq_id)
    .limit(1)
)
_UNFINISHED = Prepared(
    select(Future.id).where(
        _OF_MODEL,
        Future.seq_id <= bindparam("until"),
        Future.unit.is_not(None),
        Future.status == literal_column("'pending'"),
    )
)
_NOT_REPLAYED = or_(
    Future.seq_id <= bindparam("until"),
    and_(Future.kind == RequestKind.FORWARD, Future.seq_id > bindparam("since")),
)
_FINISHED = (
    select(Future.id, Future.seq_id, func.length(Request.body).label("size"))
    .join(Request, Request.future_id == Future.id)
    .where(_OF_MODEL, _NOT_REPLAYED, Future.status != FutureStatus.PENDING)
)
_NEWEST_PASSES = (
    _FINISHED.where(Future.kind.in_(_PASSES)).order_by(Future.seq_id.desc()).limit(bindparam("most"))
)
_SOME = _FINISHED.with_only_columns(Future.id).where(Future.id.not_in(bindparam("kept", expanding=True)))
_DROP = delete(Request).where(Request.future_id.in_(_SOME.limit(bindparam("slice"))))
_WITH_BODIES = (
    select(Future.model_key)
    .join(Request, Request.future_id == Future.id)
    .where(Future.status != FutureStatus.PENDING, Future.model_key.is_not(None))
    .group_by(Future.model_key)
    .having(
        or_(func.count() > bindparam("most"), func.sum(func.length(Request.body)) > bindparam("most_bytes"))
    )
)


def unfinished_until(conn: Connection, model: ModelKey, seq_id: int) -> list[int]:
    """Return the ids of the requests up to `seq_id` that ran, and still wait for their results: saves."""
    return [row.id for row in _UNFINISHED.rows(conn, {"of": model, "until": seq_id})]


def drop_bodies(conn: Connection, model: ModelKey, until: int, since: int = 0) -> int | None:
    """Delete some bodies of finished requests up to seq_id `until`, and of forwards after `since`.

    Those of the newest passes stay for their readers: KEPT, of KEPT_BYTES together, without larger ones.
    Returns None if more are left, else the seq_id up to which no forward has a body any more.
    """
    named = {"of": model, "until": until, "since": since}
    room, kept, oldest = KEPT_BYTES, [], since + 1
    for row in conn.execute(_NEWEST_PASSES, {**named, "most": KEPT}):
        if row.size <= room:
            room -= row.size
            kept.append(row.id)
            oldest = row.seq_id
    more = conn.execute(_DROP, {**named, "kept": kept, "slice": SLICE}).rowcount == SLICE
    return None if more else oldest - 1


def models_with_bodies(conn: Connection) -> list[ModelKey]:
    """Return the models of which finished requests have more bodies than stay for readers."""
    most = {"most": KEPT, "most_bytes": KEPT_BYTES}
    return [ModelKey(key) for key in conn.scalars(_WITH_BODIES, most) if key is not None]
