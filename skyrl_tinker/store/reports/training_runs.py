"""Training runs as REST shows them: models with their last checkpoints, a page in three queries."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import ColumnElement, Connection, func, or_, select

from skyrl_tinker.domain.ids import CheckpointKind, ModelId, ModelKey, ModelState, OwnerId
from skyrl_tinker.errors import NotFoundError
from skyrl_tinker.store import model_records
from skyrl_tinker.store.api_keys import LOCAL_OWNER
from skyrl_tinker.store.checkpoint_records import WITH_MODEL, CheckpointRow, checkpoint_from_row, is_live
from skyrl_tinker.store.database.rows import AnyRow
from skyrl_tinker.store.database.tables import ApiKey, Model, SavedCheckpoint, Session
from skyrl_tinker.store.owners import in_project, owned_by

Scope = Literal["owned", "accessible"]
"""`accessible` adds the runs of others that have a published checkpoint, with nothing but those."""


@dataclass(frozen=True, slots=True)
class Run:
    """`lora_rank` 0: full parameters. `last`: the newest checkpoint of each kind."""

    model_id: ModelId
    owner: str
    base_model: str
    lora_rank: int
    last_request_at: float
    state: ModelState
    user_metadata: Mapping[str, Any]
    last: Mapping[CheckpointKind, CheckpointRow]


@dataclass(frozen=True, slots=True)
class RunPage:
    """`total`: over all pages."""

    runs: list[Run]
    total: int


@dataclass(frozen=True, slots=True)
class CheckpointPage:
    """`total`: over all pages."""

    checkpoints: list[CheckpointRow]
    total: int


def page(
    conn: Connection,
    owner: OwnerId | None,
    scope: Scope,
    limit: int,
    offset: int,
    project_id: str | None = None,
) -> RunPage:
    """The run that was asked something last comes first."""
    where = [_visible(owner, scope)]
    if project_id is not None:
        where.append(in_project([project_id]))
    count = select(func.count()).select_from(Model).join(Session, Session.session_id == Model.session_id)
    total = conn.scalar(count.where(*where)) or 0
    return RunPage(_runs(conn, owner, where, limit, offset), total)


def find(conn: Connection, owner: OwnerId | None, model_id: ModelId, scope: Scope) -> Run | None:
    """None for one that this owner does not see."""
    found = _runs(conn, owner, [Model.model_id == model_id, _visible(owner, scope)], 1, 0)
    return found[0] if found else None


def list_checkpoints(
    conn: Connection, owner: OwnerId | None, model_id: ModelId, kinds: Collection[CheckpointKind]
) -> list[CheckpointRow]:
    """Oldest first; of another owner's run those that are published. NotFoundError if nothing can be seen."""
    readable = or_(owned_by(owner), SavedCheckpoint.public)
    wanted = Model.model_id == model_id, readable, SavedCheckpoint.kind.in_(kinds), *is_live()
    rows = [
        checkpoint_from_row(row)
        for row in conn.execute(WITH_MODEL.where(*wanted).order_by(SavedCheckpoint.id))
    ]
    if not rows and model_records.find(conn, owner, model_id) is None:
        raise NotFoundError(f"no training run {model_id}")
    return rows


def page_checkpoints(
    conn: Connection, owner: OwnerId | None, kinds: Collection[CheckpointKind], limit: int, offset: int
) -> CheckpointPage:
    """This owner's, newest first."""
    wanted: tuple[ColumnElement[bool], ...] = (owned_by(owner), SavedCheckpoint.kind.in_(kinds), *is_live())
    count = (
        select(func.count())
        .select_from(SavedCheckpoint)
        .join(Model, Model.key == SavedCheckpoint.model_key)
        .join(Session, Session.session_id == Model.session_id)
    )
    rows = WITH_MODEL.where(*wanted).order_by(SavedCheckpoint.id.desc()).limit(limit).offset(offset)
    found = [checkpoint_from_row(row) for row in conn.execute(rows)]
    return CheckpointPage(found, conn.scalar(count.where(*wanted)) or 0)


def _visible(owner: OwnerId | None, scope: Scope) -> ColumnElement[bool]:
    if scope == "owned":
        return owned_by(owner)
    published = select(SavedCheckpoint.id).where(
        SavedCheckpoint.model_key == Model.key, SavedCheckpoint.public, *is_live()
    )
    return or_(owned_by(owner), published.exists())


def _runs(
    conn: Connection,
    owner: OwnerId | None,
    where: Sequence[ColumnElement[bool]],
    limit: int,
    offset: int,
) -> list[Run]:
    query = (
        select(
            Model.key,
            Model.model_id,
            func.coalesce(ApiKey.name, LOCAL_OWNER).label("owner"),
            Model.base_model,
            Model.lora_rank,
            Model.last_request_at,
            Model.state,
            Model.user_metadata,
        )
        .join(Session, Session.session_id == Model.session_id)
        .outerjoin(ApiKey, ApiKey.id == Session.owner_id)
        .where(*where)
        .order_by(Model.last_request_at.desc(), Model.key.desc())
        .limit(limit)
        .offset(offset)
    )
    rows = conn.execute(query).all()
    last = _last(conn, owner, [ModelKey(row.key) for row in rows])
    return [_run(row, last.get(ModelKey(row.key), {})) for row in rows]


def _last(
    conn: Connection, owner: OwnerId | None, models: Sequence[ModelKey]
) -> dict[ModelKey, dict[CheckpointKind, CheckpointRow]]:
    newest = (
        select(func.max(SavedCheckpoint.id))
        .join(Model, Model.key == SavedCheckpoint.model_key)
        .join(Session, Session.session_id == Model.session_id)
        .where(
            SavedCheckpoint.model_key.in_(models), or_(owned_by(owner), SavedCheckpoint.public), *is_live()
        )
        .group_by(SavedCheckpoint.model_key, SavedCheckpoint.kind)
    )
    found: dict[ModelKey, dict[CheckpointKind, CheckpointRow]] = {}
    for row in conn.execute(WITH_MODEL.where(SavedCheckpoint.id.in_(newest))):
        found.setdefault(ModelKey(row.model_key), {})[row.kind] = checkpoint_from_row(row)
    return found


def _run(row: AnyRow, last: Mapping[CheckpointKind, CheckpointRow]) -> Run:
    return Run(
        ModelId(row.model_id),
        row.owner,
        row.base_model,
        row.lora_rank,
        row.last_request_at,
        row.state,
        row.user_metadata,
        last,
    )
