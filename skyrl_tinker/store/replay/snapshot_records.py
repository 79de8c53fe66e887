"""Snapshots of models in training: the newest one of each, from which replay begins."""

from dataclasses import dataclass

from sqlalchemy import Connection, bindparam, delete, insert, select

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.store.database.file_paths import from_stored, to_stored
from skyrl_tinker.store.database.prepared import Prepared
from skyrl_tinker.store.database.rows import as_row, database_time, values_of
from skyrl_tinker.store.database.tables import Snapshot

_OF_MODEL = Snapshot.model_key == bindparam("of")
_DIRECTORIES = select(Snapshot.model_key, Snapshot.directory)
_FIND = Prepared(select(Snapshot.seq_id, Snapshot.directory, Snapshot.optimizer).where(_OF_MODEL))
_DROP = Prepared(delete(Snapshot).where(_OF_MODEL))


@dataclass(frozen=True, slots=True)
class SnapshotRow:
    """State after `seq_id`, in the files of a checkpoint. `optimizer`: load its optimizer state as well."""

    seq_id: int
    directory: str
    optimizer: bool


def put(conn: Connection, model: ModelKey, snapshot: SnapshotRow) -> None:
    """Replace a model's snapshot. The caller then removes the older one's files."""
    drop(conn, model)
    values = {**values_of(snapshot), "directory": to_stored(conn, snapshot.directory)}
    conn.execute(insert(Snapshot), {**values, "model_key": model, "created_at": database_time(conn)})


def find(conn: Connection, model: ModelKey) -> SnapshotRow | None:
    """Return a model's snapshot; None: it begins as it was created."""
    row = _FIND.row(conn, {"of": model})
    return None if row is None else as_row(SnapshotRow, row, directory=from_stored(conn, row.directory))


def all_directories(conn: Connection) -> dict[ModelKey, str]:
    """Return the directory of each model's snapshot."""
    rows = conn.execute(_DIRECTORIES)
    return {ModelKey(row.model_key): from_stored(conn, row.directory) for row in rows}


def drop(conn: Connection, model: ModelKey) -> None:
    _DROP.change(conn, {"of": model})
