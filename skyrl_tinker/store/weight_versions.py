"""Versions of weights for sampling: adapters and full parameters, named (durable) or ephemeral."""

from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    and_,
    bindparam,
    func,
    insert,
    literal_column,
    or_,
    select,
    update,
)
from sqlalchemy.orm import aliased

from skyrl_tinker.domain.ids import ModelKey, VersionId
from skyrl_tinker.domain.values import WeightVersion
from skyrl_tinker.store.database.file_paths import from_stored, to_stored
from skyrl_tinker.store.database.prepared import Prepared
from skyrl_tinker.store.database.rows import AnyRow, database_time, insert_id, total
from skyrl_tinker.store.database.tables import AdapterVersion, Future, Model, SamplingSession, Session
from skyrl_tinker.store.sampling_sessions import is_held

MODELS_AT_ONCE = 1000
"""Models of one query, which binds up to three values for each: SQLite takes 32,766, PostgreSQL 65,535."""
_UNNAMED = AdapterVersion.durable.is_(False)


class EphemeralUsage(NamedTuple):
    """Ephemeral versions of a model, published and not dropped. `ended`: the model's session is finished."""

    model_key: ModelKey
    versions: int
    inflight: int
    newest_inflight: VersionId | None
    size_bytes: int
    ended: bool


def insert_version(
    conn: Connection,
    model_key: ModelKey,
    kind: Literal["lora", "full"],
    *,
    durable: bool,
    inflight: bool = False,
    future_id: int | None = None,
) -> VersionId:
    """Insert a version, of the save `future_id`, that is not published yet: it has no directory."""
    values = {
        "model_key": model_key,
        "kind": kind,
        "durable": durable,
        "inflight": inflight,
        "future_id": future_id,
        "created_at": database_time(conn),
    }
    return VersionId(insert_id(conn, _ADD, values))


def publish_version(
    conn: Connection, version_id: VersionId, directory: str, size_bytes: int, steps: int | None = None
) -> None:
    """Make the version loadable from a directory, whose files have so many bytes.

    `steps`: how many the weights had taken, those of the model's parents included; None: not known.
    """
    values = {"directory": to_stored(conn, directory), "size_bytes": size_bytes, "steps": steps}
    _PUBLISH.change(conn, {"of": version_id, **values})


def published_version(conn: Connection, version_id: VersionId) -> WeightVersion | None:
    """Return a version, None if it is unknown, not published or dropped."""
    row = _BY_ID.row(conn, {"of": version_id})
    return None if row is None else _version(conn, row)


def was_published(conn: Connection, version_id: VersionId) -> bool:
    """Return whether a version was published, though it may be dropped since."""
    row = _DIRECTORY.row(conn, {"of": version_id})
    return row is not None and row.directory is not None


def version_of_save(conn: Connection, model_key: ModelKey, future_id: int) -> WeightVersion | None:
    """Return the version that a save made, None if it is not published or dropped."""
    row = _OF_SAVE.row(conn, {"model_key": model_key, "future_id": future_id})
    return None if row is None else _version(conn, row)


def drop_unpublished(conn: Connection) -> None:
    """Drop the versions whose saves had not ended when an engine died; they are saved again as others."""
    _DROP_UNPUBLISHED.change(conn, {"at": database_time(conn)})


def newest_inflight(conn: Connection, model_key: ModelKey) -> WeightVersion | None:
    """Return the version that the inflight sampling sessions of a model sample from."""
    rows = _INFLIGHT.rows(conn, {"model_key": model_key})
    return _version(conn, rows[-1]) if rows else None


def ephemeral_usage(conn: Connection) -> list[EphemeralUsage]:
    """Count the ephemeral versions of each model that has some."""
    return list(map(EphemeralUsage._make, _USAGE.rows(conn, {})))


def list_droppable_versions(conn: Connection, usage: Sequence[EphemeralUsage]) -> list[WeightVersion]:
    """Return the ephemeral versions that no new sample uses.

    These are superseded inflight versions, and versions of which neither the model's session nor the session
    of any sampling session is live. (The model's counts, since its sampling session may yet be created.)
    """

    def of_part(part: Sequence[EphemeralUsage]) -> list[WeightVersion]:
        of_ended = AdapterVersion.model_key.in_([each.model_key for each in part if each.ended])
        unused = and_(of_ended, ~is_held(AdapterVersion.id), ~_followed())
        newest = [each.newest_inflight for each in part if each.inflight]
        superseded = and_(AdapterVersion.inflight, AdapterVersion.id.not_in(newest))
        of_models = AdapterVersion.model_key.in_([each.model_key for each in part])
        return _found(conn, _UNNAMED, of_models, or_(unused, superseded))

    return _in_parts([each for each in usage if each.ended or each.inflight > 1], of_part)


def list_surplus_versions(
    conn: Connection, usage: Sequence[EphemeralUsage], keep: int, created_before: float | None = None
) -> list[WeightVersion]:
    """Return the ephemeral versions of each model but its `keep` newest, oldest first; none is inflight.

    `created_before`: of those, only the ones of before then, UTC seconds.
    """

    def of_part(part: Sequence[EphemeralUsage]) -> list[WeightVersion]:
        newest = aliased(AdapterVersion)
        oldest_kept = (
            select(newest.id)
            .where(*_pinned(newest), newest.model_key == Model.key)
            .order_by(newest.id.desc())
            .offset(keep - 1)
            .limit(1)
        )
        old = () if created_before is None else (AdapterVersion.created_at < created_before,)
        of_models = (
            select(Model.key, oldest_kept.scalar_subquery().label("oldest_kept"))
            .where(Model.key.in_([each.model_key for each in part]))
            .group_by(Model.key)  # else SQLite looks for the oldest once per version
            .subquery()
        )
        older = AdapterVersion.model_key == of_models.c.key, AdapterVersion.id < of_models.c.oldest_kept
        return _found(conn, *_pinned(), *older, *old)

    return _in_parts([each for each in usage if each.versions - each.inflight > keep], of_part)


def _in_parts(
    usage: Sequence[EphemeralUsage], of_part: Callable[[Sequence[EphemeralUsage]], list[WeightVersion]]
) -> list[WeightVersion]:
    """Return the versions that are found for MODELS_AT_ONCE at a time, oldest first."""
    parts = (usage[first : first + MODELS_AT_ONCE] for first in range(0, len(usage), MODELS_AT_ONCE))
    return sorted((version for part in parts for version in of_part(part)), key=attrgetter("id"))


def ephemeral_sizes(conn: Connection) -> dict[VersionId, int]:
    """Return the bytes of each ephemeral version of which they are known."""
    return {VersionId(row.id): row.size_bytes for row in _SIZES.rows(conn, {})}


def list_ephemeral_versions(conn: Connection, model_key: ModelKey | None = None) -> list[WeightVersion]:
    """Return the ephemeral versions, by default of all models, that are published and not dropped.

    The oldest comes first.
    """
    rows = (
        _UNNAMED_KEPT.rows(conn, {}) if model_key is None else _OF_MODEL.rows(conn, {"model_key": model_key})
    )
    return [_version(conn, row) for row in rows]


def list_awaited_versions(conn: Connection) -> set[VersionId]:
    """Return the versions of which samples are pending."""
    return {VersionId(row.version_id) for row in _AWAITED.rows(conn, {})}


def settle_ephemeral(conn: Connection, root: Path) -> None:
    """Note that each ephemeral version lies in `root` under its name, whatever home it was made in."""
    for version in list_ephemeral_versions(conn):
        directory = str(root / version.name)
        if version.directory != directory:
            stored = to_stored(conn, directory)
            conn.execute(
                update(AdapterVersion).where(AdapterVersion.id == version.id).values(directory=stored)
            )


def _followed() -> ColumnElement[bool]:
    """Return SQL: a sampling session of a live session follows this version's model."""
    made_on = aliased(AdapterVersion)
    follower = (
        select(SamplingSession.sampling_session_id)
        .join(Session, Session.session_id == SamplingSession.session_id)
        .join(made_on, made_on.id == SamplingSession.version_id)
        .where(made_on.model_key == AdapterVersion.model_key, made_on.inflight, Session.finished_at.is_(None))
    )
    return and_(AdapterVersion.inflight, follower.exists())


def mark_dropped(conn: Connection, version_id: VersionId) -> None:
    _set_dropped(conn, version_id, database_time(conn))


def keep(conn: Connection, version_id: VersionId) -> None:
    """Undo `mark_dropped`, while the files are there."""
    _set_dropped(conn, version_id, None)


def _set_dropped(conn: Connection, version_id: VersionId, at: float | None) -> None:
    _SET_DROPPED.change(conn, {"of": version_id, "at": at})


def _kept(version: Any = AdapterVersion) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    """Return SQL: a version is published and not dropped."""
    return version.dropped_at.is_(None), version.directory.is_not(None)


def _pinned(version: Any = AdapterVersion) -> tuple[ColumnElement[bool], ...]:
    """Return SQL: an ephemeral version is kept, and not inflight."""
    return *_kept(version), version.durable.is_(False), version.inflight.is_(False)


_AWAITED = Prepared(
    select(SamplingSession.version_id)
    .join(Future, Future.sampling_session_id == SamplingSession.sampling_session_id)
    .where(Future.status == literal_column("'pending'"), SamplingSession.version_id.is_not(None))
    .distinct()
)


def _published(*where: ColumnElement[bool]) -> Select[*tuple[Any, ...]]:
    """Return the query of versions that are published and not dropped."""
    return select(AdapterVersion.__table__).where(*_kept(), *where).order_by(AdapterVersion.id)


def _usage() -> Select[*tuple[Any, ...]]:
    """Return the query of EphemeralUsage."""
    inflight = AdapterVersion.inflight
    of_models = (
        select(
            AdapterVersion.model_key,
            func.count().label("versions"),
            func.count().filter(inflight).label("inflight"),
            func.max(AdapterVersion.id).filter(inflight).label("newest_inflight"),
            total(func.coalesce(AdapterVersion.size_bytes, 0)).label("size_bytes"),
        )
        .where(*_kept(), _UNNAMED)
        .group_by(AdapterVersion.model_key)
        .subquery()
    )
    return (
        select(of_models, Session.finished_at.is_not(None).label("ended"))
        .join(Model, Model.key == of_models.c.model_key)
        .join(Session, Session.session_id == Model.session_id)
    )


_OF_KEY = AdapterVersion.model_key == bindparam("model_key")
_OF_ID = AdapterVersion.id == bindparam("of")
_ADD = insert(AdapterVersion)
_PUBLISH = Prepared(
    update(AdapterVersion)
    .where(_OF_ID)
    .values({name: bindparam(name) for name in ("directory", "size_bytes", "steps")})
)
_SET_DROPPED = Prepared(update(AdapterVersion).where(_OF_ID).values(dropped_at=bindparam("at")))
_DROP_UNPUBLISHED = Prepared(
    update(AdapterVersion)
    .where(AdapterVersion.dropped_at.is_(None), AdapterVersion.directory.is_(None))
    .values(dropped_at=bindparam("at"))
)
_DIRECTORY = Prepared(select(AdapterVersion.directory).where(_OF_ID))
_BY_ID = Prepared(_published(_OF_ID))
_OF_SAVE = Prepared(_published(_OF_KEY, AdapterVersion.future_id == bindparam("future_id")))
_INFLIGHT = Prepared(_published(_OF_KEY, AdapterVersion.inflight.is_(True)))
_UNNAMED_KEPT, _OF_MODEL = Prepared(_published(_UNNAMED)), Prepared(_published(_UNNAMED, _OF_KEY))
_USAGE = Prepared(_usage())
_SIZES = Prepared(
    select(AdapterVersion.id, AdapterVersion.size_bytes).where(
        *_kept(), _UNNAMED, AdapterVersion.size_bytes.is_not(None)
    )
)


def _found(conn: Connection, *where: ColumnElement[bool]) -> list[WeightVersion]:
    return [_version(conn, row) for row in conn.execute(_published(*where))]


def _version(conn: Connection, row: AnyRow) -> WeightVersion:
    return WeightVersion(VersionId(row.id), row.kind, from_stored(conn, row.directory))
