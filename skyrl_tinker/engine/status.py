"""Status of the engine, for /readyz."""

import time
from typing import Literal

from sqlalchemy import Connection

from skyrl_tinker.store import server_state
from skyrl_tinker.store.doorbell import Doorbell
from skyrl_tinker.store.store import Store

KEY = "engine"
EnginePhase = Literal["starting", "ready", "restarting", "failed"]


class EngineStatus:
    """Writes `server_state["engine"]` and rings the API."""

    def __init__(self, store: Store, bell: Doorbell) -> None:
        self._store = store
        self._bell = bell

    async def report(self, phase: EnginePhase, detail: str) -> None:
        value = {"state": phase, "detail": detail, "since": time.time()}

        def op(conn: Connection) -> None:
            server_state.put(conn, KEY, value)

        await self._store.write(op)
        self._bell.ring("api")
