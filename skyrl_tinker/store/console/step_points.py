"""Points of training curves: one for each optimizer step, kept for `history_ttl_s`."""

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields

from sqlalchemy import Connection, bindparam, func, insert, select, tuple_

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.store.database.prepared import Prepared
from skyrl_tinker.store.database.tables import StepPoint


@dataclass(frozen=True, slots=True)
class Measured:
    """Measures of one step, over the positions that its accumulation window trains; None: not known.

    `loss`: sum of losses by sum of weights. `reward_proxy`: mean of advantage times logprob. `entropy_proxy`:
    mean of -logprob, as sampled or else as trained. `policy_shift`: mean of the logprob as sampled minus that
    of the trainer. `sampler_gap`: as the step reports it. The seconds are those from the arrival of the
    window's first request to the commit of the step: waiting, on the ranks, and from there to the commit.
    """

    loss: float | None
    reward_proxy: float | None
    entropy_proxy: float | None
    policy_shift: float | None
    sampler_gap: float | None
    grad_norm: float | None
    learning_rate: float | None
    tokens: int
    datums: int
    wait_s: float
    compute_s: float
    answer_s: float


@dataclass(frozen=True, slots=True)
class Point:
    """Step `step` of a model, `at` UTC seconds, by the request `seq_id`."""

    step: int
    seq_id: int
    at: float
    measured: Measured


NAMES = tuple(field.name for field in fields(Measured))
_COLUMNS = StepPoint.step, StepPoint.seq_id, StepPoint.at, *(getattr(StepPoint, name) for name in NAMES)
_LAST = Prepared(
    select(func.coalesce(func.max(StepPoint.step), 0).label("step")).where(
        StepPoint.model_key == bindparam("model_key")
    )
)
_ADD = Prepared(insert(StepPoint), ("model_key", "step", "seq_id", "at", *NAMES))


def add(conn: Connection, model: ModelKey, seq_id: int, at: float, measured: Measured) -> None:
    """Add the next point of a model."""
    last = _LAST.row(conn, {"model_key": model})
    assert last is not None, "an aggregate has a row"
    key = {"model_key": model, "step": last.step + 1, "seq_id": seq_id, "at": at}
    _ADD.change(conn, {**key, **dict(zip(NAMES, astuple(measured), strict=True))})


def points_after(conn: Connection, model: ModelKey, step: int, limit: int) -> list[Point]:
    """Return the points behind a step, in order."""
    query = select(*_COLUMNS).where(StepPoint.model_key == model, StepPoint.step > step)
    return [_point(row) for row in conn.execute(query.order_by(StepPoint.step).limit(limit))]


def last_points(conn: Connection, models: Sequence[ModelKey]) -> dict[ModelKey, Point]:
    """Return the newest point of each model that has one."""
    of_models = select(StepPoint.model_key, func.max(StepPoint.step)).where(StepPoint.model_key.in_(models))
    newest = of_models.group_by(StepPoint.model_key)
    query = select(StepPoint.model_key, *_COLUMNS)
    rows = conn.execute(query.where(tuple_(StepPoint.model_key, StepPoint.step).in_(newest)))
    return {ModelKey(model): _point(values) for model, *values in rows}


def _point(row: Iterable[object]) -> Point:
    step, seq_id, at, *measured = row
    return Point(step, seq_id, at, Measured(*measured))  # type: ignore[arg-type]
