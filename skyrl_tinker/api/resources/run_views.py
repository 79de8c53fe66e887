"""Training runs and checkpoints: rows to schemas."""

from collections.abc import Mapping
from itertools import islice
from typing import Literal

from skyrl_tinker.domain.ids import CheckpointKind, ModelState
from skyrl_tinker.domain.tinker_path import TinkerPath
from skyrl_tinker.protocol.schemas.base import utc
from skyrl_tinker.protocol.schemas.console import RunSummary
from skyrl_tinker.protocol.schemas.runs import Checkpoint, TrainingRun
from skyrl_tinker.store.checkpoint_records import CheckpointRow
from skyrl_tinker.store.database.rows import values_of
from skyrl_tinker.store.reports.training_runs import Run

_TYPES: Mapping[CheckpointKind, Literal["training", "sampler", "external"]] = {
    CheckpointKind.WEIGHTS: "training",
    CheckpointKind.SAMPLER_WEIGHTS: "sampler",
    CheckpointKind.EXTERNAL_WEIGHTS: "external",
}
_LISTED, _LISTED_CHARACTERS = 8, 200
"""Entries of a run's metadata in the list of runs, and characters of their names and values."""


def training_run(run: Run) -> TrainingRun:
    row, last = run.row, run.last.get(CheckpointKind.WEIGHTS)
    last_sampler = run.last.get(CheckpointKind.SAMPLER_WEIGHTS)
    return TrainingRun(
        training_run_id=row.model_id,
        base_model=row.base_model,
        model_owner=row.owner,
        is_lora=row.lora_rank > 0,
        lora_rank=row.lora_rank or None,
        last_request_time=utc(row.last_request_at),
        corrupted=row.state in (ModelState.FAILED, ModelState.LOST),
        last_checkpoint=last and checkpoint(last),
        last_sampler_checkpoint=last_sampler and checkpoint(last_sampler),
        user_metadata=row.user_metadata,
    )


def listed_summary(run: Run) -> RunSummary:
    """Return a run as one of many, which are asked for every few seconds: the beginning of its metadata."""
    summary = run_summary(run)
    first = islice(summary.user_metadata.items(), _LISTED)
    metadata = {name[:_LISTED_CHARACTERS]: value[:_LISTED_CHARACTERS] for name, value in first}
    return summary.model_copy(update={"user_metadata": metadata})


def run_summary(run: Run) -> RunSummary:
    row, point = run.row, run.point
    told = {
        "run_id": row.model_id,
        "lora_rank": None if row.state is ModelState.FAILED else row.lora_rank,
        "steps": point.step if point else 0,
        "loss_fn_config": row.loss_fn_config or {},
        "last": point and point.measured,
        "continued_by": run.continued_by,
    }
    return RunSummary(**{**row._mapping, **told})


def checkpoint(row: CheckpointRow) -> Checkpoint:
    path = TinkerPath(row.model_id, row.kind, row.name)
    told = {
        "checkpoint_id": path.checkpoint_id,
        "checkpoint_type": _TYPES[row.kind],
        "time": utc(row.created_at),
        "tinker_path": str(path),
        "expires_at": None if row.expires_at is None else utc(row.expires_at),
    }
    return Checkpoint(**values_of(row) | told)
