"""Purge of old rows, in slices: other writers wait for one slice at most."""

from collections.abc import Awaitable, Callable
from functools import partial

from sqlalchemy import Connection

from skyrl_tinker.config import Settings
from skyrl_tinker.domain.ids import SessionId
from skyrl_tinker.engine.upkeep.upkeep_step import Step
from skyrl_tinker.store import usage_records
from skyrl_tinker.store.replay import unit_records
from skyrl_tinker.store.retention import row_purges, session_purges, slices
from skyrl_tinker.store.retention.slices import Slice
from skyrl_tinker.store.store import Store

PURGE_S = 600.0
COUNTED_AT_ONCE = 500  # results per transaction


class Purge:
    """Rules for the deletion of rows, in order: usage is counted first, from the results."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store = store
        keep = settings.retention
        self.every_s = min(PURGE_S, keep.results_s)
        result_s, history_s, request_s = keep.results_s, keep.history_s, 2 * keep.results_s
        self._rules: dict[str, Callable[[float], Awaitable[None]]] = {
            "usage to be counted": lambda _: self._all(partial(usage_records.roll_up, most=COUNTED_AT_ONCE)),
            "results": self._older(row_purges.purge_results, result_s),
            "prompts of samples": lambda _: self._all(row_purges.purge_prompts),
            "samples": self._older(row_purges.purge_samples, request_s),
            "training requests": lambda now: self._purge_training(now - request_s),
            "weight versions": self._older(row_purges.purge_versions, request_s),
            "stability records": self._older(row_purges.purge_stability, keep.results_s),
            "the audit log": self._older(row_purges.purge_audit, history_s),
            "usage": self._older(row_purges.purge_usage, history_s),
            "training curves": self._older(row_purges.purge_points, history_s),
            "removed checkpoints": self._older(row_purges.purge_removed_checkpoints, history_s),
            "ended sessions": lambda now: self._each(
                partial(session_purges.ended_sessions, finished_before=now - request_s),
                session_purges.clear_session,
            ),
            "forgotten sessions": lambda now: self._each(
                partial(session_purges.forgettable_sessions, finished_before=now - history_s),
                session_purges.forget_session,
            ),
            "unused pages of the database": lambda _: self._all(slices.shrink),
        }

    async def run_now(self) -> bool:
        """Delete all expired rows now; return False if a rule failed, which does not stop the others."""
        now = self._store.now()
        counted, *others = (Step(name, partial(rule, now)) for name, rule in self._rules.items())
        # Usage that is not counted yet must not be deleted with the results of its session.
        return await counted.tried() and all([await step.tried() for step in others])

    async def run(self, now: float) -> None:
        """Delete all rows that are expired at `now`, UTC seconds. Raises the error of a rule."""
        for rule in self._rules.values():
            await rule(now)

    def _older(
        self, take: Callable[[Connection, float], bool], ttl_s: float
    ) -> Callable[[float], Awaitable[None]]:
        """Return a rule that deletes rows after `ttl_s`."""
        return lambda now: self._all(lambda conn: take(conn, now - ttl_s))

    async def _purge_training(self, finished_before: float) -> None:
        models = await self._store.fetch(lambda conn: unit_records.replayed_from(conn, finished_before))
        for model, seq_id in models.items():
            purge = partial(row_purges.purge_training, model=model, before_seq=seq_id)
            await self._all(partial(purge, finished_before=finished_before))

    async def _all(self, take: Slice) -> None:
        while await self._store.write(take):
            pass

    async def _each(
        self, sessions: Callable[[Connection], list[SessionId]], take: Callable[..., bool]
    ) -> None:
        for session in await self._store.fetch(sessions):
            await self._all(partial(take, session=session))
