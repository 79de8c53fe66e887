"""Liveness of this process, readiness of the engine, and the metrics of all."""

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.responses import JSONResponse

from skyrl_tinker.api.api_metrics import CONTENT_TYPE
from skyrl_tinker.api.openapi.documents import answers
from skyrl_tinker.api.resources.key_administration import require_admin
from skyrl_tinker.api.services import Deps, caller_of
from skyrl_tinker.api.waiting.engine_client import engine_state
from skyrl_tinker.protocol.schemas.session import BaseModelState, HealthResponse, ReadyResponse
from skyrl_tinker.redaction import without_paths

router = APIRouter(tags=["health"])
root = APIRouter(tags=["health"])


@router.get("/healthz", summary="200 while this process runs")
@root.get("/healthz", summary="200 while this process runs")
async def healthz() -> HealthResponse:
    return HealthResponse()


@root.get(
    "/readyz",
    summary="200 while new work is accepted, else 503 with the reason",
    response_model=ReadyResponse,
    responses={503: {"model": ReadyResponse}},
)
async def readyz(deps: Deps) -> JSONResponse:
    engine, shortage = await deps.store.read(engine_state), await deps.room.shortage()
    if engine.ready and not shortage and deps.settings.engine_listen and await deps.queues.view() is None:
        shortage = "the engine does not answer"  # its host may be gone, which the database does not know
    status, detail = 200 if engine.ready and not shortage else 503, shortage or engine.detail
    told = without_paths if deps.keys.locked else str  # this route wants no key
    bases = [
        BaseModelState(base_model=told(name), state=state, detail=told(text))
        for name, (state, text) in engine.base_models.items()
    ]
    answer = ReadyResponse(state=engine.state, detail=told(detail), base_models=bases)
    return JSONResponse(answer.model_dump(), status)


@root.get(
    "/metrics",
    summary="Prometheus metrics",
    response_class=Response,
    responses=answers("text/plain", {"type": "string"}),
)
async def metrics(request: Request, deps: Deps) -> Response:
    """Answered while the engine is down, too: engine_up is 0 then."""
    if deps.settings.metrics_key:
        require_admin(caller_of(request))
    await deps.room.shortage()
    return Response(await deps.page.get(), media_type=CONTENT_TYPE)
