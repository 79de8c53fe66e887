"""Recovery after a dead engine: models whose state died with it, and requests that were in flight.

Not implemented: snapshots and replay of the journal. Until then this says what is lost.
"""

import shutil
from collections.abc import Iterable
from pathlib import Path

from sqlalchemy import Connection

from skyrl_tinker.domain.ids import CheckpointKind, FutureStatus, ModelKey, ModelState
from skyrl_tinker.domain.tinker_path import TinkerPath
from skyrl_tinker.domain.values import Failure
from skyrl_tinker.store import checkpoint_records, model_records
from skyrl_tinker.store.database.rows import PAGE
from skyrl_tinker.store.futures import finish, queue
from skyrl_tinker.store.futures.queue import QueuedRow
from skyrl_tinker.store.model_records import ModelRow
from skyrl_tinker.store.store import Store

PARTIAL = (".*.partial", ".*.tmp")  # directories that were being written
SAMPLE_LOST = Failure("the engine restarted while this request was in flight; send it again", "server")


async def recover(store: Store, died_after: int) -> int:
    """Deal with everything up to future `died_after`; later ones are new. Returns how many models died."""
    pending = _pending(store)
    fresh = {row.model_key for row in pending if row.id > died_after and row.seq_id == 0}
    with store.read() as conn:
        candidates = model_records.list_in_states(conn, ModelState.READY, ModelState.CREATING)
        gone = [model for model in candidates if model.key not in fresh]
        lost = {model.key: why_lost(conn, model, "the engine restarted") for model in gone}
    left = [row for row in pending if row.id <= died_after]
    await store.write(lambda conn: _give_up(conn, lost, left, died_after))
    return len(lost)


def sweep_partial(directories: Iterable[Path]) -> None:
    """Remove what was half written."""
    for directory in directories:
        for path in (path for pattern in PARTIAL for path in directory.glob(pattern)):
            shutil.rmtree(path, ignore_errors=True)


def _pending(store: Store) -> list[QueuedRow]:
    found: list[QueuedRow] = []
    cursor, page = 0, PAGE
    with store.read() as conn:
        while page == PAGE:
            rows = queue.queued_after(conn, cursor, PAGE)
            found += [row for row in rows if row.status is FutureStatus.PENDING]
            page = len(rows)
            cursor = rows[-1].id if rows else cursor
    return found


def why_lost(conn: Connection, model: ModelRow, cause: str) -> str:
    """Return why a model is lost, and which checkpoint to resume from."""
    last = checkpoint_records.latest_for_model(conn, model.key, CheckpointKind.WEIGHTS)
    advice = "it had no checkpoint: create the model again"
    if last is not None:
        advice = (
            f"its last checkpoint is {TinkerPath(model.model_id, last.kind, last.name)}: resume from there"
        )
    return f"{cause} and the training state of model {model.model_id} is lost; {advice}"


def _give_up(conn: Connection, lost: dict[ModelKey, str], left: list[QueuedRow], died_after: int) -> None:
    for model, reason in lost.items():
        model_records.set_state(conn, model, ModelState.LOST, reason)
    for row in left:
        if row.model_key in lost:
            finish.fail(conn, row.id, Failure(lost[row.model_key], "server"))
    finish.fail_pending(conn, died_after, SAMPLE_LOST)
