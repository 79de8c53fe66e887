"""Training runs and checkpoints as REST lists them: a page of runs takes five queries."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from sqlalchemy import ColumnElement, Connection, Select, String, and_, cast, func, or_, select

from skyrl_tinker.domain.ids import CheckpointKind, ModelId, ModelKey, Reach
from skyrl_tinker.errors import found
from skyrl_tinker.protocol.schemas.console import Continuation, RunColumn
from skyrl_tinker.store import model_records
from skyrl_tinker.store.checkpoint_records import WITH_MODEL, CheckpointRow, checkpoint_from_row, is_live
from skyrl_tinker.store.console import step_points
from skyrl_tinker.store.console.run_reports import LAST_REWARD, LAST_REWARDED
from skyrl_tinker.store.console.step_points import Point, last_known
from skyrl_tinker.store.database.abstract_database import json_text
from skyrl_tinker.store.database.rows import AnyRow
from skyrl_tinker.store.database.tables import ApiKey, Model, SavedCheckpoint, Session, StepPoint
from skyrl_tinker.store.owners import OWNER_NAME, in_project, within
from skyrl_tinker.store.session_records import LAST_REQUEST_AT

K = TypeVar("K")
Scope = Literal["owned", "accessible"]
"""`accessible` adds other owners' runs that have published checkpoints, with only those."""
_LAST_STEP = select(func.max(StepPoint.step)).where(StepPoint.model_key == Model.key).scalar_subquery()
_SORTED: Mapping[RunColumn, ColumnElement[Any]] = {
    "name": func.lower(func.coalesce(Session.display_name, Model.model_id)),
    "project": func.lower(Session.project_id),
    "base_model": Model.base_model.expression,
    "owner": OWNER_NAME,
    "rank": Model.lora_rank.expression,
    "state": cast(Model.state, String),
    "steps": Model.steps_before + func.coalesce(_LAST_STEP, 0),
    "reward": LAST_REWARD,
    "loss": last_known(StepPoint.loss),
    "last_request": LAST_REQUEST_AT,
}
MOST_CONTINUED = 5
"""Most runs that are named as going on from one: the newest."""


@dataclass(frozen=True, slots=True)
class Run:
    """Model with its newest checkpoint of each kind (`last`), and the point of its last optimizer step.

    `row` has the names of RunSummary but `run_id`, and `model_id`.
    """

    row: AnyRow
    last: Mapping[CheckpointKind, CheckpointRow]
    point: Point | None
    continued_by: Sequence[Continuation]


@dataclass(frozen=True, slots=True)
class Page(Generic[K]):
    """Page of runs, for `runs_of`, or of checkpoints, for `checkpoints_of`; `total` counts all pages."""

    keys: list[K]
    total: int


def page(
    conn: Connection,
    reach: Reach,
    scope: Scope,
    limit: int,
    offset: int,
    project_id: str | None = None,
    words: Sequence[str] = (),
    sort: RunColumn = "last_request",
    descending: bool = True,
) -> Page[ModelKey]:
    """Return a page of runs in this order, those without a value last. Each has all `words` in its texts."""
    where = [_visible(conn, reach, scope), *map(_has_word, words)]
    if project_id is not None:
        where.append(in_project([project_id]))
    count = select(func.count()).select_from(Model).join(Session, Session.session_id == Model.session_id)
    keys = select(Model.key).join(Session, Session.session_id == Model.session_id).where(*where)
    if words or sort == "owner":
        count, keys = (each.outerjoin(ApiKey, ApiKey.id == Session.owner_id) for each in (count, keys))
    column = _SORTED[sort].desc() if descending else _SORTED[sort].asc()
    keys = keys.order_by(column.nulls_last(), Model.key.desc()).limit(limit).offset(offset)
    return Page([ModelKey(key) for key in conn.scalars(keys)], conn.scalar(count.where(*where)) or 0)


def _has_word(word: str) -> ColumnElement[bool]:
    """Look in names, and in the metadata of run and session; of `name=value` both stand in one of these."""
    of_run = Model.model_id, Model.base_model, cast(Model.state, String)
    of_session = Session.display_name, Session.project_id, OWNER_NAME
    metadata = (cast(each.user_metadata, String) for each in (Model, Session))
    parts = [json_text(part)[1:-1] for part in word.split("=")]  # as the columns have them
    return or_(
        *(each.icontains(word, autoescape=True) for each in (*of_run, *of_session)),
        *(and_(*(each.icontains(part, autoescape=True) for part in parts)) for each in metadata),
    )


def runs_of(conn: Connection, reach: Reach, keys: Sequence[ModelKey]) -> list[Run]:
    """Return the runs of keys that `page` has found, in their order."""
    runs = _runs(conn, reach, Model.key.in_(keys))
    return [runs[key] for key in keys if key in runs]


def find(conn: Connection, reach: Reach, model_id: ModelId, scope: Scope) -> Run:
    """Return a run. Raises NotFoundError if the caller does not see it."""
    runs = _runs(conn, reach, Model.model_id == model_id, _visible(conn, reach, scope))
    return found(next(iter(runs.values()), None), f"no training run {model_id}")


def list_checkpoints(
    conn: Connection, reach: Reach, model_id: ModelId, kinds: Collection[CheckpointKind]
) -> list[int]:
    """Return a run's checkpoints, oldest first; of a run that is not the caller's only published ones.

    Raises NotFoundError if the caller sees nothing of the run.
    """
    readable = or_(within(reach), SavedCheckpoint.public)
    where = Model.model_id == model_id, readable, SavedCheckpoint.kind.in_(kinds), *is_live(conn)
    ids = list(conn.scalars(_ids(*where).order_by(SavedCheckpoint.id)))
    if not ids:
        found(model_records.find(conn, reach, model_id), f"no training run {model_id}")
    return ids


def page_checkpoints(
    conn: Connection, reach: Reach, kinds: Collection[CheckpointKind], limit: int, offset: int
) -> Page[int]:
    """Return a page of the checkpoints that the caller sees, newest first."""
    where: tuple[ColumnElement[bool], ...] = (within(reach), SavedCheckpoint.kind.in_(kinds), *is_live(conn))
    newest_first = _ids(*where).order_by(SavedCheckpoint.id.desc()).limit(limit).offset(offset)
    count = _ids(*where).with_only_columns(func.count())
    return Page(list(conn.scalars(newest_first)), conn.scalar(count) or 0)


def checkpoints_of(conn: Connection, ids: Sequence[int]) -> list[CheckpointRow]:
    """Return the checkpoints that a list has found, in its order, but those that are gone since."""
    rows = conn.execute(WITH_MODEL.where(SavedCheckpoint.id.in_(ids), *is_live(conn)))
    found = {row.id: checkpoint_from_row(conn, row) for row in rows}
    return [found[each] for each in ids if each in found]


def _ids(*where: ColumnElement[bool]) -> Select[int]:
    joined = select(SavedCheckpoint.id).join(Model, Model.key == SavedCheckpoint.model_key)
    return joined.join(Session, Session.session_id == Model.session_id).where(*where)


def _visible(conn: Connection, reach: Reach, scope: Scope) -> ColumnElement[bool]:
    if scope == "owned":
        return within(reach)
    published = select(SavedCheckpoint.id).where(
        SavedCheckpoint.model_key == Model.key, SavedCheckpoint.public, *is_live(conn)
    )
    return or_(within(reach), published.exists())


def _runs(conn: Connection, reach: Reach, *where: ColumnElement[bool]) -> dict[ModelKey, Run]:
    query = (
        select(
            Model.key,
            Model.model_id,
            Session.display_name.label("name"),
            Model.session_id,
            Session.project_id,
            OWNER_NAME.label("owner"),
            Model.base_model,
            Model.lora_rank,
            LAST_REQUEST_AT.label("last_request_at"),
            Session.last_heartbeat_at,
            Model.state,
            Model.state_reason,
            Model.user_metadata,
            Model.created_at,
            Model.parent,
            Model.steps_before,
            last_known(StepPoint.loss).label("loss"),
            last_known(StepPoint.loss_fn).label("loss_fn"),
            last_known(StepPoint.loss_fn_config).label("loss_fn_config"),
            LAST_REWARD.label("reward"),
            LAST_REWARDED.label("reward_report"),
        )
        .join(Session, Session.session_id == Model.session_id)
        .outerjoin(ApiKey, ApiKey.id == Session.owner_id)
        .where(*where)
    )
    rows = {ModelKey(row.key): row for row in conn.execute(query)}
    last, points = _last(conn, reach, [*rows]), step_points.last_points(conn, [*rows])
    heirs = _continued(conn, reach, [row.model_id for row in rows.values()])
    return {
        key: Run(row, last.get(key, {}), points.get(key), heirs.get(row.model_id, ()))
        for key, row in rows.items()
    }


def _continued(conn: Connection, reach: Reach, runs: Sequence[str]) -> dict[str, list[Continuation]]:
    """Return the newest runs that the caller sees to go on from each of these, newest first."""
    newest_first = func.row_number().over(partition_by=Model.parent, order_by=Model.key.desc())
    heirs = (
        select(
            Model.parent,
            Model.model_id,
            Session.display_name,
            Model.steps_before,
            newest_first.label("place"),
        )
        .join(Session, Session.session_id == Model.session_id)
        .where(Model.parent.in_(runs), Model.parent != Model.model_id, within(reach))
        .subquery()
    )
    found: dict[str, list[Continuation]] = {}
    query = select(heirs).where(heirs.c.place <= MOST_CONTINUED).order_by(heirs.c.place)
    for parent, run, name, step, _ in conn.execute(query):
        found.setdefault(parent, []).append(Continuation(run_id=run, name=name, step=step))
    return found


def _last(
    conn: Connection, reach: Reach, models: Sequence[ModelKey]
) -> dict[ModelKey, dict[CheckpointKind, CheckpointRow]]:
    newest = (
        select(func.max(SavedCheckpoint.id))
        .join(Model, Model.key == SavedCheckpoint.model_key)
        .join(Session, Session.session_id == Model.session_id)
        .where(
            SavedCheckpoint.model_key.in_(models), or_(within(reach), SavedCheckpoint.public), *is_live(conn)
        )
        .group_by(SavedCheckpoint.model_key, SavedCheckpoint.kind)
    )
    last: dict[ModelKey, dict[CheckpointKind, CheckpointRow]] = {}
    for row in conn.execute(WITH_MODEL.where(SavedCheckpoint.id.in_(newest))):
        last.setdefault(ModelKey(row.model_key), {})[row.kind] = checkpoint_from_row(conn, row)
    return last
