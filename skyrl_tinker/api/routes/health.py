"""Liveness of this process and readiness of the engine."""

from fastapi import APIRouter
from starlette.responses import JSONResponse

from skyrl_tinker.api.services import Deps
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
