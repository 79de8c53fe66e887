"""optim_step of several models in one call of the workers. Windows with a failed request are cleared."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from skyrl_tinker.domain.ids import Effect, ModelKey
from skyrl_tinker.domain.values import Failure, StepItem, StepOutput
from skyrl_tinker.engine.outbox import json_answer, persistently
from skyrl_tinker.engine.scheduling.lanes import Lanes
from skyrl_tinker.engine.scheduling.row_work import model_of
from skyrl_tinker.engine.trainer.step_curves import TakenStep
from skyrl_tinker.protocol.stored_requests import OptimStepBody
from skyrl_tinker.store.futures import queue
from skyrl_tinker.store.futures.finish import FutureOutcome
from skyrl_tinker.store.futures.queue import QueuedRow
from skyrl_tinker.store.store import Store
from skyrl_tinker.training.trainer_group import TrainerGroup


@dataclass(frozen=True, slots=True)
class StepsResult:
    """Outcomes of the steps that are not answered yet, effects by future id, and the steps `taken`.

    A step for which memory ran out has no effect: its window goes on, with its gradients.
    """

    outcomes: Mapping[int, FutureOutcome]
    effects: Mapping[int, Effect]
    taken: tuple[TakenStep, ...] = ()


@dataclass(eq=False)
class OptimSteps:
    """Steps of optimizers. `more_metrics`: to report with a model's next step, beside the trainer's."""

    _store: Store
    _trainer: TrainerGroup
    _lanes: Lanes
    _more_metrics: Callable[[ModelKey], Mapping[str, float]]

    async def apply(self, rows: Sequence[QueuedRow]) -> StepsResult:
        """Apply the steps of valid windows together, and clear the other windows. Raises TrainerError."""
        ids = [row.id for row in rows]  # steps that were refused or have expired have no body
        bodies = await persistently(self._store.read, lambda conn: queue.read_bodies(conn, ids))
        errors = {row.id: self._lanes.window_error(model_of(row)) for row in rows}
        valid = [row for row in rows if row.id in bodies and errors[row.id] is None]
        invalid = [model_of(row) for row in rows if row not in valid]
        if invalid:
            await self._trainer.zero_gradients(invalid)
        steps = [step_item(row, bodies[row.id]) for row in valid]
        outputs = await self._trainer.optim_step(steps) if steps else []
        exhausted = {row.id for row, output in zip(valid, outputs, strict=True) if output.exhausted}
        ended = [row for row in rows if row.id not in exhausted]
        for row in ended:
            self._lanes.reset_window(model_of(row))
        metrics = [
            {**output.metrics, **(self._more_metrics(model_of(row)) if output.error is None else {})}
            for row, output in zip(valid, outputs, strict=True)
        ]
        ran = list(zip(valid, steps, outputs, metrics, strict=True))
        outcomes = {row.id: _result(output, values) for row, _, output, values in ran}
        taken = tuple(
            TakenStep(row, values, step.params.learning_rate)
            for row, step, output, values in ran
            if output.error is None
        )
        failures = {row.id: _window_failure(row, why) for row in rows if (why := errors[row.id])}
        effects = dict.fromkeys((row.id for row in ended), Effect.CLEARED)
        effects |= {step.row.id: Effect.STEP for step in taken}
        return StepsResult(outcomes | failures, effects, taken)

    async def fail(self, row: QueuedRow, failure: Failure) -> StepsResult:
        """Fail a step that cannot be run, and clear its window. Raises TrainerError."""
        await self._trainer.zero_gradients([model_of(row)])
        self._lanes.reset_window(model_of(row))
        return StepsResult({row.id: failure}, {row.id: Effect.CLEARED})


def step_item(row: QueuedRow, body: bytes) -> StepItem:
    """Return the ranks' item for a step with this stored body."""
    return StepItem(row.request_id, model_of(row), OptimStepBody.from_bytes(body).params)


def _result(output: StepOutput, metrics: Mapping[str, float]) -> FutureOutcome:
    if output.error is not None:
        return Failure(output.error, "server" if output.exhausted else "user")
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}  # JSON has no NaN
    return json_answer({"metrics": finite, "type": "optim_step"})


def _window_failure(row: QueuedRow, why: str) -> Failure:
    return Failure(
        f"optim_step with seq_id {row.seq_id} was not run and the gradients of its window are cleared: {why}",
        "user",
    )
