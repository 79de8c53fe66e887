"""optim_step of several models in one call of the workers. Windows with a failed request are cleared."""

import asyncio
import math
from collections.abc import Mapping, Sequence

from skyrl_tinker.domain.values import Failure, StepItem, StepOutput
from skyrl_tinker.engine.outbox import FutureOutcome, Outbox, json_answer, read_persistently
from skyrl_tinker.engine.parity.drift_monitor import DriftMonitor
from skyrl_tinker.engine.scheduling.lanes import Lanes, model_of
from skyrl_tinker.protocol.stored_requests import OptimStepBody
from skyrl_tinker.store.futures import queue
from skyrl_tinker.store.futures.queue import QueuedRow
from skyrl_tinker.store.store import Store
from skyrl_tinker.training.trainer_group import TrainerGroup


class OptimSteps:
    def __init__(
        self, store: Store, trainer: TrainerGroup, lanes: Lanes, drift_monitor: DriftMonitor, outbox: Outbox
    ) -> None:
        self._store = store
        self._trainer = trainer
        self._lanes = lanes
        self._drift_monitor = drift_monitor
        self._outbox = outbox

    async def apply(self, rows: Sequence[QueuedRow], background: asyncio.TaskGroup) -> None:
        """Apply the steps of valid windows together, and clear the other windows. Raises TrainerError."""
        ids = [row.id for row in rows]  # steps that were refused or have expired have no body
        bodies = await read_persistently(self._store, lambda conn: queue.read_bodies(conn, ids))
        errors = {row.id: self._lanes.window_error(model_of(row)) for row in rows}
        valid = [row for row in rows if row.id in bodies and errors[row.id] is None]
        invalid = [model_of(row) for row in rows if row not in valid]
        if invalid:
            await self._trainer.zero_gradients(invalid)
        steps = [_item(row, bodies[row.id]) for row in valid]
        outputs = await self._trainer.optim_step(steps) if steps else []
        for row in rows:
            self._lanes.reset_window(model_of(row))
        results = [
            (row.id, _result(output, self._drift_monitor.pop_gap(model_of(row))))
            for row, output in zip(valid, outputs, strict=True)
        ]
        failures = [(row.id, _window_failure(row, why)) for row in rows if (why := errors[row.id])]
        background.create_task(self._outbox.send([*results, *failures]))


def _item(row: QueuedRow, body: bytes) -> StepItem:
    return StepItem(row.request_id, model_of(row), OptimStepBody.from_bytes(body).params)


def _result(output: StepOutput | Failure, more: Mapping[str, float]) -> FutureOutcome:
    if isinstance(output, Failure):
        return output
    if output.error is not None:
        return Failure(output.error, "user")
    values = [*output.metrics.items(), *more.items()]
    metrics = {name: value for name, value in values if math.isfinite(value)}  # JSON has no NaN
    return json_answer({"metrics": metrics, "type": "optim_step"})


def _window_failure(row: QueuedRow, why: str) -> Failure:
    return Failure(
        f"optim_step with seq_id {row.seq_id} was not run and the gradients of its window are cleared: {why}",
        "user",
    )
