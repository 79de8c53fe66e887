"""Copies of checkpoints. Each belongs to a training run of its own, which exists only for its path."""

from dataclasses import dataclass, fields

from sqlalchemy import Connection, select

from skyrl_tinker.domain.ids import ModelId, ModelKey, ModelState, OwnerId, RequestKind, SessionId, VersionId
from skyrl_tinker.domain.tinker_path import TinkerPath
from skyrl_tinker.store import (
    audit_log,
    checkpoint_records,
    model_records,
    owners,
    session_records,
    weight_versions,
)
from skyrl_tinker.store.checkpoint_records import CheckpointRow, NewCheckpoint, expiry
from skyrl_tinker.store.database.tables import Future, Model, Session
from skyrl_tinker.store.futures import finish, record
from skyrl_tinker.store.model_records import DEFAULT_OPTIMIZER, NewModel
from skyrl_tinker.store.owners import owned_by

_WHY_RELEASED = "this run holds a copied checkpoint, it cannot be trained: make a new model from its path"
_KIND = RequestKind.COPY_WEIGHTS


@dataclass(frozen=True, slots=True)
class Destination:
    """Training run to be. `project_id` None: its session exists. Else the session is created for the copy."""

    session_id: SessionId
    model_seq_id: int
    project_id: str | None

    @property
    def model_id(self) -> ModelId:
        return ModelId(f"{self.session_id}:train:{self.model_seq_id}")


@dataclass(frozen=True, slots=True)
class NewCopy:
    """Copy to record: `directory` has the files of `source`; `digest` is the request's."""

    source: CheckpointRow
    directory: str
    destination: Destination
    ttl_seconds: int | None
    digest: bytes

    @property
    def path(self) -> TinkerPath:
        return TinkerPath(self.destination.model_id, self.source.kind, self.source.name)


def is_copied(conn: Connection, owner: OwnerId | None, destination: Destination, digest: bytes) -> bool:
    """Return whether this request was carried out. Raises SeqIdReusedError if another one was."""
    query = (
        select(*record.FIRST)
        .join(Model, Model.key == Future.model_key)
        .join(Session, Session.session_id == Model.session_id)
        .where(Model.model_id == destination.model_id, Future.seq_id == 0, owned_by(owner))
    )
    first = conn.execute(query).one_or_none()
    if first is not None:
        record.require_same(first, _KIND, digest, f"the training run {destination.model_id}")
    return first is not None


def add(conn: Connection, owner: OwnerId | None, new: NewCopy) -> bool:
    """Record a copy. Returns False if the same request was carried out before.

    Raises SeqIdReusedError, NotFoundError (no such session), GoneError (session finished).
    """
    if is_copied(conn, owner, new.destination, new.digest):
        return False
    _require_or_create_session(conn, owner, new.destination)
    key = _insert_run(conn, new)
    checkpoint_records.add(conn, _checkpoint(conn, new, key, _publish_version(conn, new, key)), replace=False)
    audit_log.record(
        conn,
        new.destination.session_id,
        "checkpoint_copy",
        model_id=new.destination.model_id,
        tinker_path=str(new.path),
        source_path=new.source.path,
    )
    return True


def _require_or_create_session(conn: Connection, owner: OwnerId | None, where: Destination) -> None:
    if where.project_id is None:
        owners.require_session(conn, owner, where.session_id)
        session_records.require_live(conn, where.session_id)
        return
    session_records.create(
        conn,
        owner=owner,
        tags=["copy_weights"],
        project_id=where.project_id,
        sdk_version="",
        session_id=where.session_id,
    )
    session_records.finish(conn, where.session_id, "success", None)


def _insert_run(conn: Connection, new: NewCopy) -> ModelKey:
    """Insert the run, released from the start, and in the journal the request that took its seq_id."""
    source, where = new.source, new.destination
    metadata = conn.scalar(select(Model.user_metadata).where(Model.key == source.model_key))
    config = source.optimizer_config or DEFAULT_OPTIMIZER
    model = NewModel(
        where.session_id, where.model_seq_id, source.base_model, source.spec, config, metadata or {}
    )
    key = model_records.add(conn, model, ModelState.RELEASED, _WHY_RELEASED)
    request = record.NewFuture(_KIND, 0, new.digest, where.session_id, key)
    future_id, _ = record.insert_future(conn, request, where.model_id)
    finish.succeed(conn, future_id, finish.JSON_TYPE, b"{}")
    return key


def _publish_version(conn: Connection, new: NewCopy, key: ModelKey) -> VersionId | None:
    """Publish copied sampler weights as a weight version; None for training weights."""
    if new.source.version_id is None:
        return None
    version = weight_versions.insert_version(
        conn, key, "lora" if new.source.spec.rank else "full", durable=True
    )
    size, steps = new.source.size_bytes, new.source.steps
    weight_versions.publish_version(conn, version, new.directory, size, steps)
    return version


def _checkpoint(conn: Connection, new: NewCopy, key: ModelKey, version: VersionId | None) -> NewCheckpoint:
    own = {"model_key": key, "directory": new.directory, "version_id": version}
    own |= {"expires_at": expiry(conn, new.ttl_seconds)}
    copied = {each.name: getattr(new.source, each.name) for each in fields(NewCheckpoint)}
    return NewCheckpoint(**copied | own)
