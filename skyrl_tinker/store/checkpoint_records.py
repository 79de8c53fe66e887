"""Named checkpoints, and the rules on loading one and sampling from it.

Each has a directory of its own, never reused; a replaced one becomes garbage.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import BindParameter, ColumnElement, Connection, bindparam, func, insert, or_, select, update

from skyrl_tinker.domain.bases import Bases
from skyrl_tinker.domain.ids import CheckpointKind, ModelId, ModelKey, Reach, SessionId, VersionId
from skyrl_tinker.domain.values import BaseModelFacts, LoraSpec
from skyrl_tinker.errors import NotFoundError, NotSupportedError, UserError, found
from skyrl_tinker.store import audit_log
from skyrl_tinker.store.database.file_paths import from_stored, to_stored
from skyrl_tinker.store.database.prepared import Prepared
from skyrl_tinker.store.database.rows import AnyRow, as_row, database_time, insert_id
from skyrl_tinker.store.database.tables import ApiKey, Model, SavedCheckpoint, Session
from skyrl_tinker.store.model_records import columns_of, spec_from_row
from skyrl_tinker.store.owners import OWNER_NAME, within
from skyrl_tinker.store.sampling_sessions import is_held

AT_ONCE = 500  # checkpoints that are removed in one sweep
WITH_MODEL = (
    select(SavedCheckpoint.__table__, Model.model_id, Model.session_id, OWNER_NAME.label("owner"))
    .join(Model, Model.key == SavedCheckpoint.model_key)
    .join(Session, Session.session_id == Model.session_id)
    .outerjoin(ApiKey, ApiKey.id == Session.owner_id)
)


@dataclass(frozen=True, slots=True)
class NewCheckpoint:
    """Checkpoint to record: `directory` is complete on disk; `version_id` names sampler weights in it.

    `steps`: how many its model and that one's parents had taken.
    """

    model_key: ModelKey
    kind: CheckpointKind
    name: str
    directory: str
    base_model: str
    spec: LoraSpec
    size_bytes: int
    has_optimizer: bool = False
    optimizer_config: Mapping[str, Any] = field(default_factory=dict)
    user_metadata: Mapping[str, Any] = field(default_factory=dict)
    version_id: VersionId | None = None
    expires_at: float | None = None
    steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRow(NewCheckpoint):
    """Recorded checkpoint. Times are seconds since the epoch. `owner`: the name of the key."""

    id: int
    model_id: ModelId
    session_id: SessionId
    owner: str
    created_at: float
    public: bool

    @property
    def path(self) -> str:
        return f"tinker://{self.model_id}/{self.kind}/{self.name}"


def add(conn: Connection, new: NewCheckpoint, *, replace: bool) -> int:
    """Record a checkpoint; one of the same name is replaced (its directory becomes garbage).

    Raises UserError if there is one and `replace` is false.
    """
    now = database_time(conn)
    same = {"model_key": new.model_key, "kind": new.kind, "name": new.name}
    if not replace and _LIVE.rows(conn, {**same, "now": now}):
        raise UserError(
            f"checkpoint {new.kind}/{new.name} of this model exists and overwrite is false: "
            "choose another name or delete it first"
        )
    _REPLACE.change(conn, {**same, "at": now})
    values = {**columns_of(new), "created_at": now, "directory": to_stored(conn, new.directory)}
    number = insert_id(conn, _ADD, values)
    (row,) = _BY_ID.rows(conn, {"of": number})
    _audit(conn, checkpoint_from_row(conn, row), "create", size_bytes=new.size_bytes)
    return number


def find(
    conn: Connection, reach: Reach, model_id: ModelId, kind: CheckpointKind, name: str
) -> CheckpointRow | None:
    """Return a checkpoint that the caller sees, or a published one; None if unknown, deleted or expired."""
    return _find_named(conn, or_(within(reach), SavedCheckpoint.public), model_id, kind, name)


def by_id(conn: Connection, checkpoint_id: int) -> CheckpointRow | None:
    """Return a checkpoint, None if it is deleted or expired."""
    rows = _select(conn, SavedCheckpoint.id == checkpoint_id, *is_live(conn))
    return rows[0] if rows else None


def require_within(
    conn: Connection, reach: Reach, model_id: ModelId, kind: CheckpointKind, name: str
) -> CheckpointRow:
    """Return a checkpoint that the caller sees, not one that is merely published. Raises NotFoundError."""
    row = _find_named(conn, within(reach), model_id, kind, name)
    return found(row, f"no checkpoint tinker://{model_id}/{kind}/{name}")


def latest_for_model(conn: Connection, model_key: ModelKey, kind: CheckpointKind) -> CheckpointRow | None:
    rows = _select(conn, SavedCheckpoint.model_key == model_key, SavedCheckpoint.kind == kind, *is_live(conn))
    return rows[-1] if rows else None


def delete(conn: Connection, row: CheckpointRow) -> None:
    """Hide the checkpoint: it becomes garbage."""
    _update(conn, row, deleted_at=database_time(conn))
    _audit(conn, row, "delete")


def publish(conn: Connection, row: CheckpointRow, public: bool) -> None:
    """Let other owners find the checkpoint, or no longer. No event is logged if nothing changes."""
    if row.public is not public:
        _update(conn, row, public=public)
        _audit(conn, row, "publish" if public else "unpublish")


def set_ttl(conn: Connection, row: CheckpointRow, ttl_seconds: int | None) -> None:
    """Let the checkpoint expire after `ttl_seconds` from now, or never (None)."""
    expires_at = expiry(conn, ttl_seconds)
    _update(conn, row, expires_at=expires_at)
    _audit(conn, row, "set_ttl", expires_at=expires_at)


def list_garbage(conn: Connection, now: float, after: int = 0) -> list[CheckpointRow]:
    """Return deleted or expired checkpoints that no live sampling session holds, for `mark_removed`.

    These are the next AT_ONCE `after` an id.
    """
    rows = _GARBAGE.rows(conn, {"now": now, "after": after, "most": AT_ONCE})
    return [checkpoint_from_row(conn, row) for row in rows]


def is_recorded(conn: Connection, model: ModelKey, directory: str) -> bool:
    """Return whether a checkpoint of this model has this directory, whatever became of it."""
    stored = to_stored(conn, directory)
    return any(row.directory == stored for row in _DIRECTORIES.rows(conn, {"model_key": model}))


def list_directories(conn: Connection) -> dict[str, bool]:
    """Return the directories of all checkpoints, and whether they are removed: then nobody needs them."""
    rows = conn.execute(select(SavedCheckpoint.directory, SavedCheckpoint.removed_at))
    return {from_stored(conn, row.directory): row.removed_at is not None for row in rows}


def mark_removed(conn: Connection, checkpoint_id: int) -> None:
    """Note that the directory is removed. The row stays for billing."""
    now = database_time(conn)
    ended = func.coalesce(SavedCheckpoint.deleted_at, SavedCheckpoint.expires_at, now)
    values = {"removed_at": now, "deleted_at": ended}
    conn.execute(update(SavedCheckpoint).where(SavedCheckpoint.id == checkpoint_id).values(values))


def _find_named(
    conn: Connection, owned: ColumnElement[bool], model_id: ModelId, kind: CheckpointKind, name: str
) -> CheckpointRow | None:
    named = (Model.model_id == model_id, SavedCheckpoint.kind == kind, SavedCheckpoint.name == name)
    rows = _select(conn, owned, *named, *is_live(conn))
    return rows[0] if rows else None


def _update(conn: Connection, row: CheckpointRow, **values: Any) -> None:
    conn.execute(update(SavedCheckpoint).where(SavedCheckpoint.id == row.id).values(values))


def _audit(conn: Connection, row: CheckpointRow, action: str, **details: Any) -> None:
    details = {"model_id": row.model_id, "tinker_path": row.path, **details}
    audit_log.record(conn, row.session_id, f"checkpoint_{action}", **details)


def expiry(conn: Connection, ttl_seconds: int | None) -> float | None:
    return None if ttl_seconds is None else database_time(conn) + ttl_seconds


def is_live(conn: Connection) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    """Return SQL conditions: neither deleted nor expired."""
    return _live(database_time(conn))


def _live(now: Any) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    unexpired = or_(SavedCheckpoint.expires_at.is_(None), SavedCheckpoint.expires_at > now)
    return SavedCheckpoint.deleted_at.is_(None), unexpired


_NOW: BindParameter[Any] = bindparam("now")
_OF_MODEL = SavedCheckpoint.model_key == bindparam("model_key")
_KIND_AND_NAME = SavedCheckpoint.kind == bindparam("kind"), SavedCheckpoint.name == bindparam("name")
_IN_ORDER = WITH_MODEL.order_by(SavedCheckpoint.id)
_ADD = insert(SavedCheckpoint)
_LIVE = Prepared(select(SavedCheckpoint.id).where(_OF_MODEL, *_KIND_AND_NAME, *_live(_NOW)))
_REPLACE = Prepared(
    update(SavedCheckpoint)
    .where(_OF_MODEL, *_KIND_AND_NAME, SavedCheckpoint.deleted_at.is_(None))
    .values(deleted_at=bindparam("at"))
)
_BY_ID = Prepared(WITH_MODEL.where(SavedCheckpoint.id == bindparam("of")))
_DIRECTORIES = Prepared(select(SavedCheckpoint.directory).where(_OF_MODEL))
_GARBAGE = Prepared(
    _IN_ORDER.where(
        or_(SavedCheckpoint.deleted_at.is_not(None), SavedCheckpoint.expires_at <= _NOW),
        SavedCheckpoint.removed_at.is_(None),
        ~is_held(SavedCheckpoint.version_id),
        SavedCheckpoint.id > bindparam("after"),
    ).limit(bindparam("most"))
)


def _select(conn: Connection, *where: ColumnElement[bool]) -> list[CheckpointRow]:
    return [checkpoint_from_row(conn, row) for row in conn.execute(_IN_ORDER.where(*where))]


def checkpoint_from_row(conn: Connection, row: AnyRow) -> CheckpointRow:
    """Return the checkpoint in a row of WITH_MODEL."""
    directory = from_stored(conn, row.directory)
    return as_row(CheckpointRow, row, directory=directory, spec=spec_from_row(row))


# Rules on loading one, and on sampling from it, for the API and the engine


def not_found(path: str) -> NotFoundError:
    """Return the error for a path that leads to no checkpoint which the client may read."""
    return NotFoundError(
        f"no checkpoint {path}: it was never saved, it is deleted or expired, or it is another key's and "
        "not published"
    )


def require_resumable(row: CheckpointRow, *, optimizer: bool, max_lora_rank: int) -> None:
    """Raise UserError unless a model can be loaded from `row`, with its optimizer state if `optimizer`."""
    if row.kind is not CheckpointKind.WEIGHTS:
        raise UserError(f"{row.path} is of kind {row.kind}, expected weights (made by save_weights)")
    if row.spec.rank > max_lora_rank:
        raise UserError(
            f"{row.path} has LoRA rank {row.spec.rank}, expected at most {max_lora_rank} "
            f"(the setting max_lora_rank of base model {row.base_model})"
        )
    if optimizer and not row.has_optimizer:
        raise UserError(
            f"{row.path} has no optimizer state: load it with optimizer=false "
            "(create_training_client_from_state)"
        )


def require_base(row: CheckpointRow, bases: Bases) -> BaseModelFacts:
    """Return the checkpoint's base model. Raises UserError unless it is one of `bases`."""
    facts = bases.find(row.base_model)
    if facts is None:
        raise UserError(f"{row.path} is of base model {row.base_model!r}, expected {bases}")
    return facts


def no_sampler_weights(path: str) -> NotSupportedError:
    """Return the error for a checkpoint that cannot be sampled from."""
    return NotSupportedError(
        f"{path} has no weights for sampling: expected a checkpoint made by save_weights_for_sampler"
    )
