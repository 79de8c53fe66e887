"""optim_step, of several models in one turn of the workers. A window that something spoiled is cleared."""

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence

from skyrl_tinker.domain.values import Failure, StepItem, StepOutput
from skyrl_tinker.engine.outbox import Outbox, Outcome, json_answer
from skyrl_tinker.engine.parity.drift_monitor import DriftMonitor
from skyrl_tinker.engine.scheduling.lanes import Lanes, model_of
from skyrl_tinker.protocol.stored_requests import OptimStepBody
from skyrl_tinker.store.futures import queue
from skyrl_tinker.store.futures.queue import QueuedRow
from skyrl_tinker.store.store import Store
from skyrl_tinker.training.trainer_group import TrainerGroup


class OptimSteps:
    def __init__(
        self, store: Store, trainer: TrainerGroup, lanes: Lanes, gaps: DriftMonitor, outbox: Outbox
    ) -> None:
        self._store = store
        self._trainer = trainer
        self._lanes = lanes
        self._gaps = gaps
        self._outbox = outbox

    async def run(self, rows: Sequence[QueuedRow], background: asyncio.TaskGroup) -> None:
        """Steps whose window is sound run together; the windows of the others are cleared. TrainerError."""
        bodies = await self._bodies(rows)
        poison = {row.id: self._lanes.poison_of(model_of(row)) for row in rows}
        sound = [row for row in rows if row.id in bodies and poison[row.id] is None]
        spoiled = [model_of(row) for row in rows if row not in sound]
        if spoiled:
            await self._trainer.zero_gradients(spoiled)
        steps = [_item(row, bodies[row.id]) for row in sound]
        outputs = await self._trainer.optim_step(steps) if steps else []
        for row in rows:
            self._lanes.cleanse(model_of(row))
        answers = [
            (row.id, _answer(output, self._gaps.take(model_of(row))))
            for row, output in zip(sound, outputs, strict=True)
        ]
        refusals = [(row.id, _not_run(row, why)) for row in rows if (why := poison[row.id])]
        background.create_task(self._outbox.send([*answers, *refusals]))

    async def _bodies(self, rows: Sequence[QueuedRow]) -> dict[int, bytes]:
        """By row id. Steps that were refused at the door, or whose time was over, have none."""
        with self._store.read() as conn:
            return queue.read_bodies(conn, [row.id for row in rows])


def _item(row: QueuedRow, body: bytes) -> StepItem:
    return StepItem(row.request_id, model_of(row), OptimStepBody.from_bytes(body).params)


def _answer(output: StepOutput | Failure, more: Mapping[str, float]) -> Outcome:
    if isinstance(output, Failure):
        return output
    if output.error is not None:
        return Failure(output.error, "user")
    metrics = _finite([*output.metrics.items(), *more.items()])
    return json_answer({"metrics": metrics, "type": "optim_step"})


def _finite(metrics: Iterable[tuple[str, float]]) -> dict[str, float]:
    return {name: value for name, value in metrics if math.isfinite(value)}  # JSON has no NaN


def _not_run(row: QueuedRow, why: str) -> Failure:
    return Failure(
        f"optim_step with seq_id {row.seq_id} was not run and the gradients of its window are cleared: {why}",
        "user",
    )
