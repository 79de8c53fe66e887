"""Status of the engine and its base models, for /readyz."""

import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from skyrl_tinker.store import server_state
from skyrl_tinker.store.doorbell import Doorbell
from skyrl_tinker.store.store import Store

KEY = "engine"
EnginePhase = Literal["starting", "ready", "restarting", "failed", "stopped"]
"""Only a base model is stopped."""
PhaseDetail = tuple[EnginePhase, str]
SINCE = "base_models_since"
NO_BASES: Mapping[str, PhaseDetail] = MappingProxyType({})


class EngineStatus:
    """Writes `server_state["engine"]` and rings the API."""

    def __init__(self, store: Store, bell: Doorbell) -> None:
        self._store = store
        self._bell = bell
        self._since: dict[str, tuple[EnginePhase, float]] = {}  # phases of base models

    async def report(
        self, phase: EnginePhase, detail: str, bases: Mapping[str, PhaseDetail] = NO_BASES
    ) -> None:
        """Report the engine's own phase, and those of its base models by their names."""
        now = time.time()
        for name, (own, _) in bases.items():
            if name not in self._since or self._since[name][0] != own:
                self._since[name] = own, now
        since = {name: at for name, (_, at) in self._since.items()}
        value = {"state": phase, "detail": detail, "since": now, "base_models": dict(bases), SINCE: since}
        await self._store.write(lambda conn: server_state.put(conn, KEY, value))
        self._bell.ring("api")
