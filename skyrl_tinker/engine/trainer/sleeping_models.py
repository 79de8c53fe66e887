"""Models that replay left asleep: they come back before their next unit, or while the trainer is idle."""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.engine.outbox import when_possible
from skyrl_tinker.engine.scheduling.lanes import Lanes
from skyrl_tinker.engine.scheduling.row_work import model_of
from skyrl_tinker.engine.trainer.model_lifecycle import ModelLifecycle
from skyrl_tinker.engine.trainer.model_returns import AT_ONCE, ModelReturns
from skyrl_tinker.engine.trainer.unit_execution import UnitExecution
from skyrl_tinker.errors import SkyrlTinkerError
from skyrl_tinker.store.futures.queue import QueuedRow

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class SleepingModels:
    _returns: ModelReturns
    _lanes: Lanes
    _models: ModelLifecycle
    _execution: UnitExecution

    def __post_init__(self) -> None:
        self._fetched: set[ModelKey] = set()  # fetched, or tried

    def left(self) -> list[ModelKey]:
        """Return the sleeping models; forget those that have ended meanwhile."""
        for model in [model for model in self._returns.asleep() if not self._lanes.is_open(model)]:
            self._returns.forget(model)
        left = self._returns.asleep()
        self._fetched.intersection_update(left)
        return left

    async def wake_for(self, rows: Sequence[QueuedRow], following: Callable[[], Sequence[QueuedRow]]) -> bool:
        """Bring back the models of a unit; return False if one did not come back. Raises TrainerError.

        `following`: returns the next row of each model, in the order of their turns. Its first models that
        sleep come back beside those of the unit, up to AT_ONCE: a save or a load is a unit of its own.
        """
        models = self._sleeping(rows)
        if not models:
            return True
        others = self._sleeping(following()) if len(models) < AT_ONCE else []
        together = list(dict.fromkeys([*models, *others]))[: max(AT_ONCE, len(models))]
        return (await self._wake(together)).isdisjoint(models)

    def _sleeping(self, rows: Sequence[QueuedRow]) -> list[ModelKey]:
        return [model for model in dict.fromkeys(map(model_of, rows)) if self._returns.sleeps(model)]

    async def wake_idle(self) -> bool:
        """Bring back the newest sleeping model, if any; return whether there was one. Raises TrainerError."""
        waiting = [model for model in self.left() if not self._lanes.under_way(model)]
        if waiting:
            await self._wake(waiting[:1])  # one at a time, so that a new request waits for one at most
        return bool(waiting)

    async def _wake(self, models: Sequence[ModelKey]) -> set[ModelKey]:
        """Bring back models; return those that are parked or must be tried again later.

        Files on other hosts are fetched first, while other models train.
        """
        elsewhere = await self._returns.elsewhere([model for model in models if model not in self._fetched])
        for model in elsewhere:
            self._execution.hold(model, partial(self._fetch, model))
        here = [model for model in models if model not in elsewhere]
        self._fetched.difference_update(here)
        woken = await self._returns.wake(here)
        for model, error in woken.later.items():
            _log.warning("model %s is brought back later: %s", model, error)
            self._execution.hold(model)
        await self._models.park(woken.failed)
        return {*elsewhere, *woken.later, *woken.failed}

    async def _fetch(self, model: ModelKey) -> None:
        """Fetch a model's files, however long storage is away, while the model is open."""

        async def attempt() -> None:
            if self._lanes.is_open(model):
                await self._returns.fetch(model)

        with suppress(SkyrlTinkerError):  # waking it reports the error
            await when_possible(attempt)
        self._fetched.add(model)
