"""Metrics of the engine, its samplers and this process as one text."""

import asyncio
import time

from skyrl_tinker.api.api_metrics import ApiMetrics
from skyrl_tinker.api.waiting.engine_client import EngineClient, EngineUnavailableError, engine_state
from skyrl_tinker.store.store import Store

KEPT_S = 1.0


class MetricsPage:
    """Page that is made once in KEPT_S, so that ten scrapers cost as much as one."""

    def __init__(self, store: Store, engine: EngineClient, metrics: ApiMetrics) -> None:
        self._store = store
        self._engine = engine
        self._metrics = metrics
        self._making = asyncio.Lock()
        self._text = b""
        self._made_at = float("-inf")

    async def text(self) -> bytes:
        """Return the page, at most KEPT_S old; also while the engine is down."""
        async with self._making:
            if time.monotonic() - self._made_at >= KEPT_S:
                self._text = await self._make()
                self._made_at = time.monotonic()
            return self._text

    async def _make(self) -> bytes:
        try:
            engine, up = await self._engine.get("/metrics"), True
        except EngineUnavailableError:
            engine, up = b"", False
        state = await self._store.read(engine_state)
        return self._metrics.text(engine_up=up, ready=state.ready) + engine
