"""Status of the engine and its base models, for /readyz."""

import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from sqlalchemy import Connection

from skyrl_tinker.store import server_state
from skyrl_tinker.store.doorbell import Doorbell
from skyrl_tinker.store.store import Store

KEY = "engine"
EnginePhase = Literal["starting", "ready", "restarting", "failed", "stopped"]
"""Only a base model is stopped."""
PhaseDetail = tuple[EnginePhase, str]
NO_BASES: Mapping[str, PhaseDetail] = MappingProxyType({})


class EngineStatus:
    """Writes `server_state["engine"]` and rings the API."""

    def __init__(self, store: Store, bell: Doorbell) -> None:
        self._store = store
        self._bell = bell

    async def report(
        self, phase: EnginePhase, detail: str, bases: Mapping[str, PhaseDetail] = NO_BASES
    ) -> None:
        """Report the engine's own phase, and those of its base models by their names."""
        value = {"state": phase, "detail": detail, "since": time.time(), "base_models": dict(bases)}

        def op(conn: Connection) -> None:
            server_state.put(conn, KEY, value)

        await self._store.write(op)
        self._bell.ring("api")
