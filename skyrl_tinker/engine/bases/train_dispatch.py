"""Training requests of all base models, each at the driver of its own."""

from collections.abc import Mapping, Sequence

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.domain.values import Failure
from skyrl_tinker.engine.outbox import persistently
from skyrl_tinker.engine.scheduling.lanes import Gap
from skyrl_tinker.engine.trainer.trainer_driver import TrainerDriver
from skyrl_tinker.protocol.queue_views import LaneView, TrainingView
from skyrl_tinker.store.futures import queue
from skyrl_tinker.store.futures.queue import QueuedRow
from skyrl_tinker.store.store import Store


class TrainDispatch:
    """Models of base models that are not trained here are at the first driver: they are parked, or fail."""

    def __init__(self, drivers: Sequence[TrainerDriver], store: Store) -> None:
        """`drivers`: one for each base model that is trained, at least one."""
        self.drivers = drivers
        self._lanes = [driver.requests.lanes for driver in drivers]
        self._store = store
        self._of = {name: driver for driver in drivers for name in driver.facts.names}

    def _driver(self, base_model: str | None) -> TrainerDriver:
        return self._of.get(base_model or "", self.drivers[0])

    async def resume(self) -> int:
        """Continue where an earlier engine stopped. Call it before the drivers run.

        Returns the future id after which the journal has all requests to run.
        """
        await self.drivers[0].sweep()
        next_seqs = {model: seq for driver in self.drivers for model, seq in (await driver.resume()).items()}
        return await persistently(self._store.read, lambda conn: queue.before_waiting(conn, next_seqs))

    async def submit(self, rows: Sequence[QueuedRow]) -> None:
        """Accept requests, those of each model in the order of their arrival. They may arrive twice."""
        by_driver: dict[TrainerDriver, list[QueuedRow]] = {}
        for row in rows:
            by_driver.setdefault(self._driver(row.base_model), []).append(row)
        for driver, own in by_driver.items():
            await driver.requests.submit(own)

    def views(self) -> dict[str, TrainingView]:
        """Return the queues by the name of their base model."""
        return {driver.facts.name: driver.view() for driver in self.drivers}

    def lane_statuses(self) -> dict[ModelKey, LaneView]:
        """Return the lanes with waiting rows."""
        return {model: lane for lanes in self._lanes for model, lane in lanes.statuses().items()}

    def gaps(self) -> dict[ModelKey, Gap]:
        """Return the current gaps of lanes."""
        return {model: gap for lanes in self._lanes for model, gap in lanes.gaps().items()}

    async def expire(self, late: Sequence[tuple[QueuedRow, Failure]]) -> None:
        """Fail requests that waited too long; later ones go on, as after any failed request."""
        for driver in self.drivers:
            if own := [each for each in late if self._driver(each[0].base_model) is driver]:
                await driver.requests.expire(own)

    async def give_up(self, failures: Mapping[ModelKey, Failure]) -> None:
        """Fail all requests of these models with gaps, waiting and future ones."""
        for driver, lanes in zip(self.drivers, self._lanes, strict=True):
            if own := {model: failure for model, failure in failures.items() if lanes.knows(model)}:
                await driver.requests.give_up(own)

    def release(self, model: ModelKey, base_model: str) -> None:
        """Release a model whose session is over, once it has no runnable requests left."""
        self._driver(base_model).requests.release(model)
