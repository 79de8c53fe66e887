"""Training runs: one for each model ever created."""

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Query
from sqlalchemy import Connection
from starlette.responses import Response

from skyrl_tinker.api.requests.responses import json_by_parts
from skyrl_tinker.api.resources.run_views import training_run
from skyrl_tinker.api.services import Deps, Reached
from skyrl_tinker.domain.ids import ModelId, ModelKey
from skyrl_tinker.protocol.schemas.runs import (
    Cursor,
    TrainingRun,
    TrainingRunQuery,
    TrainingRunsQuery,
    TrainingRunsResponse,
)
from skyrl_tinker.store.reports import training_runs

router = APIRouter(tags=["runs"], prefix="/training_runs")


@router.get("", summary="Your training runs, most recently used first", response_model=TrainingRunsResponse)
async def list_training_runs(
    query: Annotated[TrainingRunsQuery, Query()], deps: Deps, reach: Reached
) -> Response:
    page = await deps.store.report(
        lambda conn: training_runs.page(
            conn, reach, query.access_scope, query.limit, query.offset, query.project_id
        ),
        reach,
    )
    cursor = Cursor(offset=query.offset, limit=query.limit, total_count=page.total)
    answer = TrainingRunsResponse(training_runs=[], cursor=cursor)

    def items(conn: Connection, keys: Sequence[ModelKey]) -> list[str]:
        return [training_run(run).model_dump_json() for run in training_runs.runs_of(conn, reach, keys)]

    return await json_by_parts(deps.store, reach, answer, "training_runs", page.keys, items)


@router.get("/{run}", summary="A training run (a model) and its last checkpoints")
async def get_training_run(
    run: str, query: Annotated[TrainingRunQuery, Query()], deps: Deps, reach: Reached
) -> TrainingRun:
    row = await deps.store.report(
        lambda conn: training_runs.find(conn, reach, ModelId(run), query.access_scope), reach
    )
    return training_run(row)
