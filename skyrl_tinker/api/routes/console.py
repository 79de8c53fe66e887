"""Routes of the dashboard and of `skyrl-tinker status`."""

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Query, Request
from sqlalchemy import Connection
from starlette.responses import Response, StreamingResponse

from skyrl_tinker.api.openapi.documents import answers, takes
from skyrl_tinker.api.requests.request_body import read_model
from skyrl_tinker.api.requests.responses import json_by_parts, json_from_rows
from skyrl_tinker.api.resources import step_curve
from skyrl_tinker.api.resources.now_view import NowView, sees_all
from skyrl_tinker.api.resources.run_views import listed_summary, run_summary
from skyrl_tinker.api.resources.server_trace import trace_of
from skyrl_tinker.api.resources.token_view import items_of, request_summary, tokens_of
from skyrl_tinker.api.services import CallerDep, Deps, Owner, Reached
from skyrl_tinker.api.waiting.engine_client import EngineUnavailableError
from skyrl_tinker.domain.ids import ModelId, ModelKey, OwnerId, Reach
from skyrl_tinker.errors import found
from skyrl_tinker.protocol.activity import Activity, activity_from_bytes
from skyrl_tinker.protocol.schemas.console import (
    ItemsResponse,
    PointsQuery,
    PointsResponse,
    ReadableQuery,
    ReadableResponse,
    ReportRequest,
    ReportsQuery,
    ReportsResponse,
    RunsQuery,
    RunsResponse,
    RunSummary,
    TokensQuery,
    TokensResponse,
    TraceQuery,
)
from skyrl_tinker.protocol.schemas.now import NowResponse, RecentRates
from skyrl_tinker.protocol.schemas.runs import Paging
from skyrl_tinker.store import model_records
from skyrl_tinker.store.console import run_reports, step_points
from skyrl_tinker.store.console.readable_requests import StoredTokens, readable_requests, stored_tokens
from skyrl_tinker.store.console.traced_requests import recent_requests
from skyrl_tinker.store.reports import training_runs

CSV = "text/csv"
router = APIRouter(tags=["console"], prefix="/console")


@router.get("/now", summary="The server now: problems, queues, rates, trainer, samplers, processes")
async def now(deps: Deps, caller: CallerDep) -> NowResponse:
    """Show the caller's own work, and that of all with an admin key or on a server without keys.

    It is at most a second old, however many ask.
    """
    return await NowView(deps, await deps.snapshot.get(), caller).message()


@router.get("/rates", summary="Tokens per second over the last hour")
async def rates(deps: Deps, caller: CallerDep) -> RecentRates:
    try:
        return RecentRates.model_validate_json(await deps.engine.ask("/rates"))
    except EngineUnavailableError:
        return RecentRates(every_s=1, trained=[], sampled=[])


@router.get(
    "/runs", summary="Training runs with the measures of their last step", response_model=RunsResponse
)
async def list_runs(query: Annotated[RunsQuery, Query()], deps: Deps, reach: Reached) -> Response:
    """List of long metadata the beginning; `/console/runs/{run}` has all. The order is that of all runs."""
    words = (query.search or "").split()
    shown, descending = (query.limit, query.offset), query.order == "descending"
    page = await deps.store.report(
        lambda conn: training_runs.page(
            conn, reach, "owned", *shown, words=words, sort=query.sort, descending=descending
        ),
        reach,
    )

    def items(conn: Connection, keys: Sequence[ModelKey]) -> list[str]:
        return [listed_summary(run).model_dump_json() for run in training_runs.runs_of(conn, reach, keys)]

    answer = RunsResponse(runs=[], total=page.total)
    return await json_by_parts(deps.store, reach, answer, "runs", page.keys, items)


@router.get("/runs/{run}", summary="A training run with the measures of its last step")
async def get_run(run: str, deps: Deps, reach: Reached) -> RunSummary:
    return await deps.store.report(
        lambda conn: run_summary(training_runs.find(conn, reach, ModelId(run), "owned")), reach
    )


@router.get(
    "/runs/{run}/points",
    summary="Points of a run's curves, one for each optimizer step",
    response_model=PointsResponse,
)
async def points(run: str, query: Annotated[PointsQuery, Query()], deps: Deps, reach: Reached) -> Response:
    """Go on from `next` to get new points only."""

    def read(conn: Connection) -> PointsResponse:
        model = _model(conn, reach, run)
        found = step_points.points_after(conn, model, query.after, query.limit)
        return step_curve.columns(found, query.after, query.limit)

    return await json_from_rows(deps.store, reach, read)


@router.get(
    "/runs/{run}/points.csv",
    summary="All points of a run as CSV",
    response_class=Response,
    responses=answers(CSV, {"type": "string"}),
)
async def points_csv(run: str, deps: Deps, reach: Reached) -> StreamingResponse:
    model = await deps.store.read(lambda conn: _model(conn, reach, run))
    name = run.replace(":", "-")
    headers = {"Content-Disposition": f'attachment; filename="{name}.csv"'}
    return StreamingResponse(step_curve.csv_lines(deps.store, reach, model), media_type=CSV, headers=headers)


@router.post(
    "/runs/{run}/metrics",
    **takes(
        "Report numbers of a step of a run that only its script knows, such as the reward", ReportRequest
    ),
)
async def report_metrics(run: str, request: Request, deps: Deps, owner: Owner) -> dict[str, str]:
    """Accept them at any time, also of a run that is not in training. The dashboard draws each name."""
    await deps.room.require()
    report = await read_model(request, ReportRequest)
    await deps.store.write(
        lambda conn: run_reports.add(conn, _model(conn, owner, run), report.step, report.values)
    )
    return {}


@router.get(
    "/runs/{run}/metrics", summary="Numbers that the script of a run reported", response_model=ReportsResponse
)
async def reported_metrics(
    run: str, query: Annotated[ReportsQuery, Query()], deps: Deps, reach: Reached
) -> Response:
    """Go on from `next` to get new ones only."""
    return await json_from_rows(
        deps.store,
        reach,
        lambda conn: run_reports.reports_after(
            conn, _model(conn, reach, run), query.after, query.limit, reward_only=query.reward_only
        ),
    )


@router.get(
    "/trace",
    summary="Trace of the last minutes for Perfetto: requests, units of work, weights, counters",
    response_class=Response,
    responses=answers("application/json", {"type": "object"}),
)
async def trace(query: Annotated[TraceQuery, Query()], deps: Deps, caller: CallerDep) -> Response:
    """Show the caller's requests. The engine's memory of them is gone with it: then they have no parts."""
    since = deps.store.now() - 60 * query.minutes
    try:
        activity = activity_from_bytes(await deps.engine.ask(f"/activity?since={since}"))
    except EngineUnavailableError:
        activity = Activity()

    def build(conn: Connection) -> bytes:
        found = recent_requests(conn, caller.reach, since)
        return trace_of(found, activity, addresses=sees_all(caller))

    headers = {"Content-Disposition": 'attachment; filename="skyrl-tinker-trace.json"'}
    built = await deps.store.report(build, caller.reach)
    return Response(built, headers=headers, media_type="application/json")


@router.get(
    "/requests",
    summary="Your finished passes and samples whose tokens are stored, newest first",
    response_model=ReadableResponse,
)
async def list_readable(query: Annotated[ReadableQuery, Query()], deps: Deps, owner: Owner) -> Response:
    """Show the caller's requests only: admins do not read prompts."""

    def read(conn: Connection) -> ReadableResponse:
        rows = readable_requests(conn, owner, query)
        requests = [request_summary(conn, row, deps.bases, deps.heads) for row in rows]
        return ReadableResponse(requests=requests)

    return await json_from_rows(deps.store, owner, read)


@router.get(
    "/requests/{request_id}/tokens",
    summary="Tokens of a datum or a sampled sequence, as text and with their values",
    response_model=TokensResponse,
)
async def tokens(
    request_id: str, query: Annotated[TokensQuery, Query()], deps: Deps, owner: Owner
) -> Response:
    """Decode data that is stored anyway, of the caller's own requests."""
    return await json_from_rows(
        deps.store, owner, lambda conn: tokens_of(_stored(conn, owner, request_id), query.item, deps.bases)
    )


@router.get(
    "/requests/{request_id}/items",
    summary="Datums of a pass, or sequences of a sample, with their prompts and advantages",
    response_model=ItemsResponse,
)
async def items(request_id: str, query: Annotated[Paging, Query()], deps: Deps, owner: Owner) -> Response:
    """Show the caller's own, in their order; those with equal `prompt_id` are a group."""
    return await json_from_rows(
        deps.store, owner, lambda conn: items_of(_stored(conn, owner, request_id), query, deps.bases)
    )


def _stored(conn: Connection, owner: OwnerId | None, request_id: str) -> StoredTokens:
    otherwise = f"no finished pass or sample {request_id!r} of yours, or its result has expired"
    return found(stored_tokens(conn, owner, request_id), otherwise)


def _model(conn: Connection, reach: Reach, run: str) -> ModelKey:
    """Return the key of a run that the caller sees. Raises NotFoundError."""
    return found(model_records.find(conn, reach, ModelId(run)), f"no training run {run}").key
