"""Standing warning of models whose samplers drift from their trainer: one, while there are such models."""

from sqlalchemy import Connection

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.engine.outbox import persistently
from skyrl_tinker.store import server_state
from skyrl_tinker.store.store import Store


class WarningBoard:
    """Models of all base models that drift."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._drifted: set[ModelKey] = set()

    async def clear(self) -> None:
        """Withdraw the warning of an earlier engine."""
        await self._put(None)

    async def warn(self, model: ModelKey, warning: str) -> None:
        """Post the warning of a model, unless that of another one stands."""
        first = not self._drifted
        self._drifted.add(model)
        if first:
            await self._put(warning)

    async def withdraw(self, model: ModelKey) -> None:
        """Withdraw the warning once no model drifts any more."""
        if model not in self._drifted:
            return
        self._drifted.discard(model)
        if not self._drifted:
            await self._put(None)

    async def _put(self, warning: str | None) -> None:
        def op(conn: Connection) -> None:
            server_state.put(conn, server_state.WARNING, warning)

        await persistently(lambda: self._store.write(op))
