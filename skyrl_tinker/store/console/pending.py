"""Pending requests by session: how many, and the oldest of them."""

from collections.abc import Collection
from dataclasses import dataclass

from sqlalchemy import Connection, func, literal_column, select

from skyrl_tinker.domain.ids import ModelId, OwnerId, RequestKind
from skyrl_tinker.store.database.rows import AnyRow
from skyrl_tinker.store.database.tables import ApiKey, Future, Model, SamplingSession, Session
from skyrl_tinker.store.futures.cancellation import OF_SAMPLE, POSITION, QueuePosition
from skyrl_tinker.store.owners import OWNER_NAME

MOST = 200
"""Sessions that are listed, those with the oldest requests."""
MOST_READ = 50_000
"""Requests that are counted: the oldest."""
_PENDING = Future.status == literal_column("'pending'")  # a bound value would not use the partial index
_SAMPLING = Future.kind == RequestKind.SAMPLE


@dataclass(frozen=True, slots=True)
class PendingGroup:
    """Samples, or other requests, of one session of this `name`. `created_at`: of the oldest."""

    owner_id: OwnerId | None
    owner: str
    name: str | None
    session_id: str
    sampling: bool
    waiting: int
    oldest: QueuePosition
    created_at: float


@dataclass(frozen=True, slots=True)
class NamedModel:
    """Model with its owner, and the name of its session."""

    model_id: ModelId
    name: str | None
    owner_id: OwnerId | None


def pending_groups(conn: Connection) -> list[PendingGroup]:
    """Return the requests that wait, the oldest first."""
    pending = (
        select(Future.id, Future.session_id, _SAMPLING.label("sampling"))
        .where(_PENDING)
        .order_by(Future.id)
        .limit(MOST_READ)
        .subquery()
    )
    first = func.min(pending.c.id)
    groups = (
        select(first.label("first"), func.count().label("waiting"))
        .group_by(pending.c.session_id, pending.c.sampling)
        .order_by(first)
        .limit(MOST)
        .subquery()
    )
    query = (
        select(
            Session.owner_id,
            OWNER_NAME,
            Session.display_name,
            Session.session_id,
            _SAMPLING,
            groups.c.waiting,
            *POSITION,
            Future.created_at,
        )
        .join(Future, Future.id == groups.c.first)
        .join(Session, Session.session_id == Future.session_id)
        .outerjoin(SamplingSession, OF_SAMPLE)
        .outerjoin(ApiKey, ApiKey.id == Session.owner_id)
        .order_by(Future.id)
    )
    return [_group(row) for row in conn.execute(query)]


def _group(row: AnyRow) -> PendingGroup:
    owner_id, owner, name, session_id, sampling, waiting, *position, created_at = row
    return PendingGroup(
        owner_id, owner, name, session_id, bool(sampling), waiting, QueuePosition(*position), created_at
    )


def named_models(conn: Connection, keys: Collection[int]) -> dict[int, NamedModel]:
    """Return models by key."""
    columns = Model.key, Model.model_id, Session.display_name, Session.owner_id
    query = select(*columns).join(Session, Session.session_id == Model.session_id)
    rows = conn.execute(query.where(Model.key.in_(keys)))
    return {key: NamedModel(ModelId(model), name, _owner(owner)) for key, model, name, owner in rows}


def _owner(number: int | None) -> OwnerId | None:
    return None if number is None else OwnerId(number)
