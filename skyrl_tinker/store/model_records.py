"""Models in training."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    BindParameter,
    ColumnElement,
    Connection,
    bindparam,
    func,
    insert,
    select,
    update,
)
from sqlalchemy.orm import InstrumentedAttribute

from skyrl_tinker.domain.ids import ModelId, ModelKey, ModelState, Reach, SessionId
from skyrl_tinker.domain.values import LoraSpec
from skyrl_tinker.store import session_records
from skyrl_tinker.store.database.prepared import Prepared
from skyrl_tinker.store.database.rows import AnyRow, as_row, database_time, insert_id, values_of
from skyrl_tinker.store.database.tables import Model, Session, StepPoint
from skyrl_tinker.store.owners import within

DEFAULT_OPTIMIZER: Mapping[str, Any] = {"type": "adamw"}
_BY_KEY = Prepared(select(Model.__table__).where(Model.key == bindparam("of")))
_BY_ID = Prepared(select(Model.__table__).where(Model.model_id == bindparam("of")))
_IN_ORDER = select(Model.__table__).order_by(Model.key)
_IN_STATES = _IN_ORDER.where(Model.state.in_(bindparam("of", expanding=True)))
_READY = _IN_ORDER.where(
    Model.state == ModelState.READY, Model.base_model.in_(bindparam("of", expanding=True))
)
_SET_STATE = (
    update(Model)
    .where(Model.key == bindparam("of"), Model.state.in_(bindparam("was", expanding=True)))
    .values(state=bindparam("to"), state_reason=bindparam("why"))
)


@dataclass(frozen=True, slots=True)
class NewModel:
    """Model to record."""

    session_id: SessionId
    model_seq_id: int
    base_model: str
    spec: LoraSpec
    optimizer_config: Mapping[str, Any]
    user_metadata: Mapping[str, Any]

    @property
    def model_id(self) -> ModelId:
        return ModelId(f"{self.session_id}:train:{self.model_seq_id}")


@dataclass(frozen=True, slots=True)
class ModelRow(NewModel):
    """Recorded model. Times are seconds since the epoch. `trained_on`: see `note_base`."""

    key: ModelKey
    state: ModelState
    state_reason: str | None
    created_at: float
    trained_on: str | None


def find(conn: Connection, reach: Reach, model_id: ModelId) -> ModelRow | None:
    """Return a model that the caller sees, None if there is none of this id."""
    query = select(Model.__table__).join(Session, Session.session_id == Model.session_id)
    row = conn.execute(query.where(Model.model_id == model_id, within(reach))).one_or_none()
    return None if row is None else _model(row)


def by_id(conn: Connection, model_id: ModelId) -> ModelRow | None:
    row = _BY_ID.row(conn, {"of": model_id})
    return None if row is None else _model(row)


def by_key(conn: Connection, key: ModelKey) -> ModelRow:
    row = _BY_KEY.row(conn, {"of": key})
    assert row is not None, "futures refer to models"
    return _model(row)


def list_in_states(conn: Connection, *states: ModelState) -> list[ModelRow]:
    """Return the models in these states, in order of creation."""
    return [_model(row) for row in conn.execute(_IN_STATES, {"of": states})]


def list_ready(conn: Connection, base_model: Collection[str]) -> list[ModelRow]:
    """Return the models in training of a base model, given its names, in order of creation."""
    return [_model(row) for row in conn.execute(_READY, {"of": list(base_model)})]


def list_for_session(conn: Connection, session_id: SessionId) -> list[ModelRow]:
    """Return the models of a session, in order of creation."""
    return [_model(row) for row in conn.execute(_IN_ORDER.where(Model.session_id == session_id))]


def add(conn: Connection, new: NewModel, state: ModelState, reason: str | None) -> ModelKey:
    """Insert a model. The caller has looked for duplicates in the same transaction."""
    now = database_time(conn)
    own = {"model_id": new.model_id, "state": state, "state_reason": reason}
    values = {**columns_of(new), **own, "created_at": now, "last_request_at": now}
    return ModelKey(insert_id(conn, insert(Model), values))


def set_state(
    conn: Connection,
    key: ModelKey,
    state: ModelState,
    reason: str | None = None,
    *,
    was: Collection[ModelState] = session_records.HELD,
) -> bool:
    """Set the state of a model that is in one of the states `was`; returns whether it is.

    By default one that has ended, while it was created perhaps, keeps its end.
    """
    change = {"of": key, "was": list(was), "to": state, "why": reason}
    return bool(conn.execute(_SET_STATE, change).rowcount)


def note_base(conn: Connection, fingerprint: str, name: str | None = None) -> None:
    """Note the base model of the models that have a state and were made since the last note.

    `name`: of those that name it so; None: of all.
    """
    unknown = Model.trained_on.is_(None), Model.state.in_((ModelState.READY, ModelState.PARKED))
    named = () if name is None else (Model.base_model == name,)
    conn.execute(update(Model).where(*unknown, *named).values(trained_on=fingerprint))


def name_base(conn: Connection, fingerprint: str, names: Sequence[str]) -> None:
    """Have the models that were trained on a base model name it as it is served now: by one of `names`."""
    other = Model.trained_on == fingerprint, Model.base_model.not_in(names)
    conn.execute(update(Model).where(*other).values(base_model=names[0]))


def set_spec(conn: Connection, key: ModelKey, spec: LoraSpec, optimizer_config: Mapping[str, Any]) -> None:
    """Set the spec of a model that is created from a checkpoint."""
    values = {"optimizer_config": dict(optimizer_config), **spec_columns(spec)}
    conn.execute(update(Model).where(Model.key == key).values(values))


def note_parent(conn: Connection, key: ModelKey, parent: ModelId, steps: int) -> None:
    """Note the run that a model without steps goes on from, and the steps of its checkpoint."""
    if conn.scalar(select(StepPoint.id).where(StepPoint.model_key == key).limit(1)) is not None:
        return
    conn.execute(update(Model).where(Model.key == key).values(parent=parent, steps_before=steps))


def steps_taken(conn: Connection, key: ModelKey, seq_id: int) -> int:
    """Return how many steps a model and its parents had taken at the turn of its request `seq_id`."""
    row = _STEPS.row(conn, {"of": key, "seq_id": seq_id})
    return 0 if row is None else int(row[0])


def steps_at(seq_id: InstrumentedAttribute[int | None] | BindParameter[int]) -> ColumnElement[int]:
    """Return the same as SQL, for a query of models."""
    earlier = select(StepPoint.step).where(StepPoint.model_key == Model.key, StepPoint.seq_id < seq_id)
    last = earlier.order_by(StepPoint.step.desc()).limit(1).scalar_subquery()
    return Model.steps_before + func.coalesce(last, 0)


_STEPS = Prepared(select(steps_at(bindparam("seq_id"))).where(Model.key == bindparam("of")))


def columns_of(new: Any) -> dict[str, Any]:
    """Return the columns of a new model or checkpoint by the names of its fields."""
    values = values_of(new)
    mappings = {name: dict(values[name]) for name in ("optimizer_config", "user_metadata")}
    return {**spec_columns(values.pop("spec")), **values, **mappings}


def spec_columns(spec: LoraSpec) -> dict[str, Any]:
    return {
        "lora_rank": spec.rank,
        "seed": spec.seed,
        "train_mlp": spec.train_mlp,
        "train_attn": spec.train_attn,
        "train_unembed": spec.train_unembed,
    }


def spec_from_row(row: AnyRow) -> LoraSpec:
    """Return the LoraSpec in a row that has `spec_columns`."""
    return LoraSpec(row.lora_rank, row.seed, row.train_mlp, row.train_attn, row.train_unembed)


def _model(row: AnyRow) -> ModelRow:
    return as_row(ModelRow, row, spec=spec_from_row(row))
