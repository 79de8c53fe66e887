"""Points of training curves: one for each optimizer step, kept for `retention.history_s`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, ScalarSelect, bindparam, func, insert, select, tuple_
from sqlalchemy.orm import InstrumentedAttribute

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.protocol.schemas.console import StepMeasures
from skyrl_tinker.store.database.prepared import Prepared
from skyrl_tinker.store.database.tables import Model, StepPoint


@dataclass(frozen=True, slots=True)
class LossFunction:
    """Loss of a pass. `config`: as sent, defaults not filled in."""

    name: str
    config: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Point:
    """Step `step` of a model, `at` UTC seconds, by the request `seq_id`."""

    step: int
    seq_id: int
    at: float
    measured: StepMeasures


NAMES = tuple(StepMeasures.model_fields)
_COLUMNS = StepPoint.step, StepPoint.seq_id, StepPoint.at, *(getattr(StepPoint, name) for name in NAMES)
_LAST = Prepared(
    select(func.coalesce(func.max(StepPoint.step), 0).label("step")).where(
        StepPoint.model_key == bindparam("model_key")
    )
)
_ADD = Prepared(insert(StepPoint), ("model_key", "step", "seq_id", "at", "loss_fn", "loss_fn_config", *NAMES))


def last_known(column: InstrumentedAttribute[Any]) -> ScalarSelect[Any]:
    """Return, for a query of models, the value of the last step that has one."""
    known = select(column).where(StepPoint.model_key == Model.key, column.is_not(None))
    return known.order_by(StepPoint.step.desc()).limit(1).scalar_subquery()


def add(
    conn: Connection,
    model: ModelKey,
    seq_id: int,
    at: float,
    measured: StepMeasures,
    loss: LossFunction | None = None,
) -> None:
    """Add the next point of a model. `loss`: of the last pass of its window."""
    last = _LAST.row(conn, {"model_key": model})
    assert last is not None, "an aggregate has a row"
    key = {"model_key": model, "step": last.step + 1, "seq_id": seq_id, "at": at}
    of_loss = {"loss_fn": loss and loss.name, "loss_fn_config": loss and dict(loss.config)}
    _ADD.change(conn, {**key, **of_loss, **measured.model_dump()})


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


def _point(row: Iterable[Any]) -> Point:
    step, seq_id, at, *measured = row
    return Point(step, seq_id, at, StepMeasures(**dict(zip(NAMES, measured, strict=True))))
