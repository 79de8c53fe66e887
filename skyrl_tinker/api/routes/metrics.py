"""Prometheus metrics: the engine's, its samplers' and this process's own."""

from fastapi import APIRouter, Request
from fastapi.responses import Response

from skyrl_tinker.api.api_metrics import CONTENT_TYPE
from skyrl_tinker.api.openapi.documents import answers
from skyrl_tinker.api.resources.key_administration import require_admin
from skyrl_tinker.api.services import Deps, caller_of

router = APIRouter(tags=["health"])


@router.get(
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
    return Response(await deps.page.text(), media_type=CONTENT_TYPE)
