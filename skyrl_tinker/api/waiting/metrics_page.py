"""Metrics of the engine, its samplers and this process as one text."""

from skyrl_tinker.api.api_metrics import ApiMetrics
from skyrl_tinker.api.waiting.engine_client import EngineClient, EngineUnavailableError, engine_state
from skyrl_tinker.store.store import Store


async def make_page(store: Store, engine: EngineClient, metrics: ApiMetrics) -> bytes:
    """Return the page; also while the engine is down."""
    try:
        told, up = await engine.ask("/metrics"), True
    except EngineUnavailableError:
        told, up = b"", False
    state = await store.read(engine_state)
    return metrics.text(engine_up=up, ready=state.ready) + told
