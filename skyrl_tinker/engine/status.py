"""Status of the engine, for /readyz and for the supervisor that starts the next engine."""

import time
from typing import Any, Literal

from sqlalchemy import Connection

from skyrl_tinker.store import server_state
from skyrl_tinker.store.doorbell import Doorbell
from skyrl_tinker.store.futures import queue
from skyrl_tinker.store.store import Store

KEY = "engine"
EnginePhase = Literal["starting", "ready", "restarting", "failed"]


class EngineStatus:
    """Writes `server_state["engine"]` and rings the API."""

    def __init__(self, store: Store, bell: Doorbell, died_after: int) -> None:
        self._store = store
        self._bell = bell
        self._died_after = died_after
        self._recovered = False

    @classmethod
    def open(cls, store: Store, bell: Doorbell) -> "EngineStatus":
        """Read the last future that an earlier engine may have worked on, by default the newest."""
        with store.read() as conn:
            left: Any = server_state.get(conn, KEY)
            newest = queue.last_id(conn)
        died_after = left.get("died_after") if isinstance(left, dict) else None
        return cls(store, bell, newest if died_after is None else died_after)

    @property
    def died_after(self) -> int:
        """Id of the last future that an earlier engine may have worked on."""
        return self._died_after

    def recovered(self) -> None:
        """Record that futures up to `died_after` are settled."""
        self._recovered = True

    async def report(self, phase: EnginePhase, detail: str) -> None:
        died_after = None if self._recovered else self._died_after
        value = {"state": phase, "detail": detail, "since": time.time(), "died_after": died_after}

        def op(conn: Connection) -> None:
            server_state.put(conn, KEY, value)

        await self._store.write(op)
        self._bell.ring("api")
