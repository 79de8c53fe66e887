"""Prometheus metrics: the engine's, and whether it is up."""

from fastapi import APIRouter
from fastapi.responses import Response

from skyrl_tinker.api.openapi.documents import answers
from skyrl_tinker.api.services import Deps
from skyrl_tinker.api.waiting.engine_client import EngineUnavailableError
from skyrl_tinker.api.waiting.readiness import engine_state

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

router = APIRouter(tags=["health"])


@router.get(
    "/metrics",
    summary="Prometheus metrics",
    response_class=Response,
    responses=answers("text/plain", {"type": "string"}),
)
async def metrics(deps: Deps) -> Response:
    """Also while the engine is away, so that this can be seen."""
    try:
        text, up = await deps.engine.get("/metrics"), 1
    except EngineUnavailableError:
        text, up = b"", 0
    ready = (await engine_state(deps.store)).ready
    own = _gauge("engine_up", "Whether the engine answers", up)
    own += _gauge("ready", "Whether requests are worked on now", int(ready))
    own += _gauge(
        "api_loop_block_seconds_max",
        "Longest time that the API's event loop was blocked since this was read last, at most 10 ms too long",
        round(deps.watch.longest_s(), 4),
    )
    return Response(own.encode() + text, media_type=CONTENT_TYPE)


def _gauge(name: str, help_text: str, value: float) -> str:
    name = f"skyrl_tinker_{name}"
    return f"# HELP {name} {help_text}\n# TYPE {name} gauge\n{name} {value}\n"
