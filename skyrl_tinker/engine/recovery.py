"""Recovery after a dead engine: what is lost with it, and from where the new one reads the journal.

Pending samples and creations go on: whatever a dead engine had done for them, nobody has seen it.
Not implemented: snapshots and replay of the journal. Until then a model that was created is lost.
"""

import shutil
from collections.abc import Iterable
from pathlib import Path

from sqlalchemy import Connection

from skyrl_tinker.domain.ids import CheckpointKind, ModelState
from skyrl_tinker.domain.tinker_path import TinkerPath
from skyrl_tinker.domain.values import Failure
from skyrl_tinker.store import checkpoint_records, model_records
from skyrl_tinker.store.futures import finish, queue
from skyrl_tinker.store.model_records import ModelRow
from skyrl_tinker.store.store import Store

PARTIAL = (".*.partial", ".*.tmp")  # directories that were being written


async def give_up_models(store: Store) -> int:
    """Fail every request of the models that an earlier engine had created. Returns how many models."""
    return await store.write(_give_up)


async def first_unread(store: Store) -> int:
    """Return the id after which the journal has every request that still has to run."""
    return await store.fetch(queue.before_pending)


def sweep_partial(directories: Iterable[Path]) -> None:
    """Remove what was half written."""
    for directory in directories:
        for path in (path for pattern in PARTIAL for path in directory.glob(pattern)):
            shutil.rmtree(path, ignore_errors=True)


def why_lost(conn: Connection, model: ModelRow, cause: str) -> str:
    """Return why a model is lost, and which checkpoint to resume from."""
    last = checkpoint_records.latest_for_model(conn, model.key, CheckpointKind.WEIGHTS)
    advice = "it had no checkpoint: create the model again"
    if last is not None:
        advice = (
            f"its last checkpoint is {TinkerPath(model.model_id, last.kind, last.name)}: resume from there"
        )
    return f"{cause} and the training state of model {model.model_id} is lost; {advice}"


def _give_up(conn: Connection) -> int:
    lost = model_records.list_in_states(conn, ModelState.READY)
    for model in lost:
        reason = why_lost(conn, model, "the engine restarted")
        model_records.set_state(conn, model.key, ModelState.LOST, reason)
        for future_id in queue.pending_of(conn, model.key):
            finish.fail(conn, future_id, Failure(reason, "server"))
    return len(lost)
