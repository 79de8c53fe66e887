"""Purge of old rows, in slices: other writers wait for one slice at most."""

from collections.abc import Callable
from functools import partial

from sqlalchemy import Connection

from skyrl_tinker.config import Settings
from skyrl_tinker.domain.ids import SessionId
from skyrl_tinker.store import usage_records
from skyrl_tinker.store.replay import unit_records
from skyrl_tinker.store.retention import row_purges, session_purges, slices
from skyrl_tinker.store.retention.slices import Slice
from skyrl_tinker.store.store import Store

PURGE_S = 600.0
COUNTED_AT_ONCE = 500  # results per transaction


class Purge:
    def __init__(self, store: Store, settings: Settings) -> None:
        self._store = store
        self._settings = settings
        self._purged_at = 0.0

    async def run_when_due(self) -> None:
        now = self._store.now()
        if now - self._purged_at > min(PURGE_S, self._settings.result_ttl_s):
            self._purged_at = now
            await self.run(now)

    async def run(self, now: float) -> None:
        """Delete all that is too old. Usage is counted first, since results have it."""
        settings = self._settings
        results, history = now - settings.result_ttl_s, now - settings.history_ttl_s
        requests = results - settings.result_ttl_s
        await self._all(partial(usage_records.roll_up, most=COUNTED_AT_ONCE))
        await self._all(partial(row_purges.purge_results, finished_before=results))
        await self._all(partial(row_purges.purge_samples, finished_before=requests))
        for model, seq_id in (await self._store.fetch(unit_records.replayed_from)).items():
            purge = partial(row_purges.purge_training, model=model, before_seq=seq_id)
            await self._all(partial(purge, finished_before=requests))
        await self._all(partial(row_purges.purge_versions, dropped_before=requests))
        await self._all(partial(row_purges.purge_stability, used_before=now - settings.stability_ttl_s))
        await self._all(partial(row_purges.purge_audit, before=history))
        await self._all(partial(row_purges.purge_usage, before=history))
        await self._all(partial(row_purges.purge_points, before=history))
        await self._all(partial(row_purges.purge_removed_checkpoints, removed_before=history))
        await self._each(
            partial(session_purges.ended_sessions, finished_before=requests), session_purges.clear_session
        )
        await self._each(
            partial(session_purges.forgettable_sessions, finished_before=history),
            session_purges.forget_session,
        )
        await self._all(slices.shrink)

    async def _all(self, take: Slice) -> None:
        while await self._store.write(take):
            pass

    async def _each(
        self,
        sessions: Callable[[Connection], list[SessionId]],
        take: Callable[..., bool],
    ) -> None:
        for session in await self._store.fetch(sessions):
            await self._all(partial(take, session=session))
