"""Training runs and checkpoints, from rows to the wire."""

import json
from collections.abc import Mapping
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from skyrl_tinker.errors import NotFoundError
from skyrl_tinker.store import checkpoints, models
from skyrl_tinker.store.checkpoints import CheckpointRow
from skyrl_tinker.wire.ids import CheckpointKind, ModelId, ModelState
from skyrl_tinker.wire.models import Checkpoint, TrainingRun, utc
from skyrl_tinker.wire.paths import TinkerPath

OWNER = "local"  # until there are API keys


async def training_run(conn: AsyncConnection, model_id: ModelId) -> TrainingRun:
    """NotFoundError for an unknown run."""
    row = await models.by_id(conn, model_id)
    if row is None:
        raise NotFoundError(f"no training run {model_id}")
    last = await checkpoints.last_of_model(conn, row.key, CheckpointKind.WEIGHTS)
    last_sampler = await checkpoints.last_of_model(conn, row.key, CheckpointKind.SAMPLER_WEIGHTS)
    return TrainingRun(
        training_run_id=row.model_id,
        base_model=row.base_model,
        model_owner=OWNER,
        is_lora=row.spec.rank > 0,
        lora_rank=row.spec.rank or None,
        last_request_time=utc(row.last_request_at),
        corrupted=row.state in (ModelState.FAILED, ModelState.LOST),
        last_checkpoint=last and checkpoint(last),
        last_sampler_checkpoint=last_sampler and checkpoint(last_sampler),
        user_metadata=as_strings(row.user_metadata),
    )


def checkpoint(row: CheckpointRow) -> Checkpoint:
    path = TinkerPath(row.model_id, row.kind, row.name)
    return Checkpoint(
        checkpoint_id=path.checkpoint_id,
        checkpoint_type="training" if row.kind is CheckpointKind.WEIGHTS else "sampler",
        time=utc(row.created_at),
        tinker_path=str(path),
        size_bytes=row.size_bytes,
        user_metadata=as_strings(row.user_metadata),
        expires_at=None if row.expires_at is None else utc(row.expires_at),
    )


def as_strings(metadata: Mapping[str, Any]) -> dict[str, str]:
    """create_model takes any JSON as values; the SDK crashes on reading anything but strings."""
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in metadata.items()}
