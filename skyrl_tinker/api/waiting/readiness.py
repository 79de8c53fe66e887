"""What the engine says about itself in the store."""

from dataclasses import dataclass

from skyrl_tinker.store import server_state
from skyrl_tinker.store.store import Store


@dataclass(frozen=True, slots=True)
class EngineState:
    state: str  # starting | ready | failed | restarting
    detail: str

    @property
    def ready(self) -> bool:
        return self.state == "ready"


async def engine_state(store: Store) -> EngineState:
    """`starting` until the engine has said anything."""
    with store.read() as conn:
        value = server_state.get(conn, "engine")
    if value is None:
        return EngineState("starting", "the engine has not reported yet")
    return EngineState(value["state"], value["detail"])
