"""Prometheus metrics: the engine's and this process's own."""

from fastapi import APIRouter
from fastapi.responses import Response

from skyrl_tinker.api.openapi.documents import answers
from skyrl_tinker.api.services import Deps
from skyrl_tinker.api.waiting.engine_client import EngineUnavailableError, engine_state

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

router = APIRouter(tags=["health"])


@router.get(
    "/metrics",
    summary="Prometheus metrics",
    response_class=Response,
    responses=answers("text/plain", {"type": "string"}),
)
async def metrics(deps: Deps) -> Response:
    """Answered while the engine is down, too: engine_up is 0 then."""
    try:
        text, up = await deps.engine.get("/metrics"), 1
    except EngineUnavailableError:
        text, up = b"", 0
    ready = (engine_state(deps.store)).ready
    gauges = _gauge("engine_up", "Whether the engine answers", up)
    gauges += _gauge("ready", "Whether the engine processes requests", int(ready))
    gauges += _gauge(
        "api_loop_block_seconds_max",
        "Longest block of the API's event loop since the last scrape, overestimated by at most 10 ms",
        round(deps.watch.longest_s(), 4),
    )
    return Response(gauges.encode() + text, media_type=CONTENT_TYPE)


def _gauge(name: str, help_text: str, value: float) -> str:
    name = f"skyrl_tinker_{name}"
    return f"# HELP {name} {help_text}\n# TYPE {name} gauge\n{name} {value}\n"
