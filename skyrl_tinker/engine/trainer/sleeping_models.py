"""Models that replay left asleep: they come back before their next unit, or while the trainer is idle."""

import logging
from collections.abc import Sequence
from contextlib import suppress

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.engine.colocation.placement import Placement
from skyrl_tinker.engine.outbox import when_possible
from skyrl_tinker.engine.scheduling.lanes import Lanes, model_of
from skyrl_tinker.engine.trainer.model_lifecycle import ModelLifecycle
from skyrl_tinker.engine.trainer.replay import Replay
from skyrl_tinker.engine.trainer.unit_execution import UnitExecution
from skyrl_tinker.errors import ExhaustedError, SkyrlTinkerError, StorageError
from skyrl_tinker.store.futures.queue import QueuedRow

_log = logging.getLogger(__name__)


class SleepingModels:
    def __init__(
        self,
        replay: Replay,
        lanes: Lanes,
        models: ModelLifecycle,
        execution: UnitExecution,
        placement: Placement,
    ) -> None:
        self._replay = replay
        self._lanes = lanes
        self._models = models
        self._execution = execution
        self._placement = placement
        self._fetched: set[ModelKey] = set()  # fetched, or tried

    def left(self) -> list[ModelKey]:
        """Return the sleeping models; forget those that have ended meanwhile."""
        for model in [model for model in self._replay.asleep() if not self._lanes.is_open(model)]:
            self._replay.forget(model)
        left = self._replay.asleep()
        self._fetched.intersection_update(left)
        return left

    async def wake_for(self, rows: Sequence[QueuedRow]) -> bool:
        """Bring back the models of a unit; return False if one did not come back. Raises TrainerError."""
        for model in {model: None for model in map(model_of, rows) if self._replay.sleeps(model)}:
            if not await self._wake(model):
                return False
        return True

    async def wake_idle(self) -> bool:
        """Bring back the newest sleeping model, if any; return whether there was one. Raises TrainerError."""
        waiting = [model for model in self.left() if not self._lanes.under_way(model)]
        if waiting:
            await self._wake(waiting[0])
        return bool(waiting)

    async def _wake(self, model: ModelKey) -> bool:
        """Bring back a model; return False if it is parked or must be tried again later.

        Files on other hosts are fetched first, while other models train.
        """
        if model in self._fetched:
            self._fetched.discard(model)
        elif not await self._replay.is_here(model):
            self._execution.hold(model, self._fetch(model))
            return False
        try:
            async with self._placement.training():
                cause = await self._replay.wake(model)
        except (StorageError, ExhaustedError) as error:
            _log.warning("model %s is brought back later: %s", model, error)
            self._execution.hold(model)
            return False
        if cause is not None:
            await self._models.park({model: cause})
        return cause is None

    async def _fetch(self, model: ModelKey) -> None:
        """Fetch a model's files, however long storage is away, while the model is open."""

        async def attempt() -> None:
            if self._lanes.is_open(model):
                await self._replay.fetch(model)

        with suppress(SkyrlTinkerError):  # waking it reports the error
            await when_possible(attempt)
        self._fetched.add(model)
