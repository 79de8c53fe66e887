"""Standing warning of models whose samplers drift from their trainer: one, while there are such models."""

from functools import partial

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.engine.outbox import persistently
from skyrl_tinker.store import server_state
from skyrl_tinker.store.store import Store


class WarningBoard:
    """Models of all base models that drift."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._warnings: dict[ModelKey, str] = {}  # of those that drift
        self._posted: str | None = None

    async def clear(self) -> None:
        """Withdraw the warning of an earlier engine."""
        await self._put(None)

    async def warn(self, model: ModelKey, warning: str) -> None:
        """Post the warning of a model, unless one stands."""
        self._warnings.setdefault(model, warning)
        await self._post()

    async def withdraw(self, model: ModelKey) -> None:
        """Withdraw the warning of a model, and post that of another one that drifts."""
        self._warnings.pop(model, None)
        await self._post()

    async def _post(self) -> None:
        first = next(iter(self._warnings.values()), None)
        if first != self._posted:
            self._posted = first
            await self._put(first)

    async def _put(self, warning: str | None) -> None:
        put = partial(server_state.put, key=server_state.WARNING, value=warning)
        await persistently(self._store.write, put)
