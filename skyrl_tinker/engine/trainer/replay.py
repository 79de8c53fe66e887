"""Replay: repeats the units that models ran since their snapshots, once they are back on fresh ranks.

Replay repeats committed units, in rows of the same size, through the ordinary passes and steps, many models
at a time; outcomes are dropped, since the clients have them. On one CPU rank the models are then the same to
the last bit; elsewhere they are close, as sums are taken in other orders.
"""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from skyrl_tinker.domain.ids import SAVES, Effect, FutureStatus, ModelKey
from skyrl_tinker.domain.units import counted
from skyrl_tinker.domain.values import Failure, PassOutput
from skyrl_tinker.engine.colocation.placement import Placement
from skyrl_tinker.engine.outbox import AWAY_S, persistently
from skyrl_tinker.engine.parity.drift_monitor import DriftMonitor
from skyrl_tinker.engine.parity.probe import prove_ranks
from skyrl_tinker.engine.recovery.replay_order import as_they_ran, merged
from skyrl_tinker.engine.recovery.snapshot_keeper import SnapshotKeeper
from skyrl_tinker.engine.scheduling.planner import Pass
from skyrl_tinker.engine.scheduling.row_work import model_of
from skyrl_tinker.engine.trainer.model_returns import TRIES, History, ModelReturns, cause_of
from skyrl_tinker.engine.trainer.optim_steps import step_item
from skyrl_tinker.engine.trainer.pass_preparation import PassCoordinator
from skyrl_tinker.errors import TrainerError
from skyrl_tinker.protocol.protobuf import pass_results
from skyrl_tinker.store.futures import outcomes, queue
from skyrl_tinker.store.futures.queue import QueuedRow
from skyrl_tinker.store.replay.unit_records import RanRow
from skyrl_tinker.store.store import Store
from skyrl_tinker.system.off_loop import off_loop
from skyrl_tinker.training.trainer_group import PassResult, TrainerGroup
from skyrl_tinker.training.trainer_spec import retry_budget

ATTEMPTS = 3
"""Most deaths of the ranks by the replay of one request: first as it ran, then alone in smaller rows."""
REPORT_S = 0.5
TOLERANCES = {"float32": 1e-4, "bfloat16": 0.03}
"""Largest mean difference between a replayed pass's logprobs and the delivered ones, by trainer dtype.

The bounds of scripts/gpu-check after some steps: bfloat16 enlarges differences in a last bit of weights.
"""
_log = logging.getLogger(__name__)

RepeatSaves = Callable[[Sequence[QueuedRow]], Awaitable[None]]
"""Repeat saves that had been captured, but not answered, when the ranks died."""
Progress = Callable[[int, int], Awaitable[None]]
"""(units done, all units): called to report progress."""


@dataclass(frozen=True, slots=True)
class ReplayedModels:
    """Number of models, units replayed for them, and by model why it could not be brought back.

    `asleep`: number of models that come back on demand.
    """

    models: int
    asleep: int
    units: int
    seconds: float
    failed: Mapping[ModelKey, str]

    def __str__(self) -> str:
        back, units = self.models - self.asleep - len(self.failed), self.units
        later = f"; {self.asleep} more will when they are asked for" if self.asleep else ""
        return (
            f"{counted(back, 'model')} came back, with {counted(units, 'replayed unit')} "
            f"of work, in {self.seconds:.1f} s{later}"
        )


@dataclass(eq=False)
class Replay:
    """Replay of the units since the snapshots. `pass_tokens`: bound of a pass of several models."""

    _store: Store
    _trainer: TrainerGroup
    _returns: ModelReturns
    _passes: PassCoordinator
    _snapshots: SnapshotKeeper
    _drift_monitor: DriftMonitor
    _placement: Placement
    _pass_tokens: int

    def __post_init__(self) -> None:
        self._tries = Counter[ModelKey]()  # consecutive failed tries without a death
        self._in_vain = False  # memory was waited for in vain, and was not available since
        self._failed: dict[ModelKey, str] = {}
        self._together = True  # False: the ranks died while units were replayed
        self._deaths = Counter[int]()  # of the ranks during the replay of a request, by future id
        self.units = 0  # replayed so far
        self.differences = 0  # passes whose logprobs differ from those delivered

    async def run(
        self, repeat_saves: RepeatSaves, progress: Progress, wanted: Collection[ModelKey] = ()
    ) -> ReplayedModels:
        """Bring back all ready models on empty ranks, except those that can sleep and are not `wanted`.

        Models with a request that kills the ranks each time are not brought back.
        Raises TrainerError if the ranks die meanwhile: call it again on fresh ones.
        """
        began = time.monotonic()
        self._tries.clear()
        self._in_vain = False
        self._snapshots.reset()
        begun = await self._returns.begin(wanted)
        self._failed = dict(begun.failed)
        self._together = self._together and not self._deaths
        if begun.back and not self._together:
            async with self._placement.training():
                await prove_ranks(self._trainer, begun.back[0].model.key)
        units = await self._repeat(begun.back, repeat_saves, progress)
        self._deaths.clear()
        self._together = True
        seconds = time.monotonic() - began
        return ReplayedModels(begun.models, begun.asleep, units, seconds, self._failed)

    async def _repeat(
        self, histories: Sequence[History], repeat_saves: RepeatSaves, progress: Progress
    ) -> int:
        """Repeat the requests that these models ran; return the number of their units.

        Where trainer and samplers share devices, the samplers may have them after each batch.
        """
        rows = [row for history in histories for row in history.rows]
        left, reported = Counter(row.unit for row in rows), -math.inf
        spent_s, busy_s = 0.0, self._trainer.busy_s
        together = merged(rows, self._pass_tokens, self._trainer.spec.resident_models)
        for batch in together if self._together else as_they_ran(rows):
            if time.monotonic() - reported > REPORT_S:
                reported = time.monotonic()
                await progress(sum(not count for count in left.values()), len(left))
            async with self._placement.training():
                began = time.monotonic()
                open_rows = [row for row in batch if model_of(row.row) not in self._failed]
                await self._replay(open_rows, repeat_saves)
                spent_s += time.monotonic() - began
            left.subtract(row.unit for row in batch)
        beside_s = spent_s - (self._trainer.busy_s - busy_s)
        self._snapshots.work.of_request.note(max(0.0, beside_s), len(rows))
        self.units += len(left)
        return len(left)

    async def _wait(self, models: Sequence[ModelKey], why: str) -> list[ModelKey]:
        """Wait for memory if another try may help some of these models, and return them.

        None once a model has waited in vain and nothing has worked since: all need memory.
        """
        self._tries.update(models)
        again = [model for model in models if not self._in_vain and self._tries[model] < TRIES]
        if not again:
            self._in_vain = True
        else:
            _log.warning("tried again in %.0f s: %s", AWAY_S, why)
            await asyncio.sleep(AWAY_S)
        return again

    def _worked(self, model: ModelKey) -> None:
        """Record that memory was available."""
        del self._tries[model]
        self._in_vain = False

    async def _replay(self, rows: Sequence[RanRow], repeat_saves: RepeatSaves) -> None:
        """Replay one unit, request by request if it killed the ranks before."""
        apart = any(row.row.id in self._deaths for row in rows)
        for part in [[row] for row in rows] if apart else [rows]:
            if any(self._deaths[row.row.id] >= ATTEMPTS for row in part):
                row = part[0].row
                why = f"request {row.seq_id} kills the trainer's processes each time it is replayed"
                self._failed[model_of(row)] = why
                continue
            try:
                await self._replay_part(part, repeat_saves, apart=apart)
            except TrainerError:
                if len({row.unit for row in part}) > 1:
                    self._together = False
                else:
                    self._deaths.update(row.row.id for row in part)
                raise

    async def _replay_part(self, rows: Sequence[RanRow], repeat_saves: RepeatSaves, *, apart: bool) -> None:
        """Replay requests of one kind, each with its effect."""
        busy_s = self._trainer.busy_s
        await self._replay_pass([row for row in rows if row.effect is Effect.GRADIENTS], apart=apart)
        await self._replay_steps([row.row for row in rows if row.effect is Effect.STEP])
        if cleared := [model_of(row.row) for row in rows if row.effect is Effect.CLEARED]:
            await self._trainer.zero_gradients(cleared)
        if saves := [row.row for row in rows if row.row.kind in SAVES]:
            await repeat_saves(saves)
        effects = {row.row.id: row.effect for row in rows}
        self._snapshots.work.note([row.row for row in rows], effects, self._trainer.busy_s - busy_s)

    async def _replay_pass(self, rows: Sequence[RanRow], *, apart: bool) -> None:
        if not rows:
            return
        budget = rows[0].row_budget or self._trainer.spec.token_budget
        smaller = retry_budget(budget)
        ready = await self._passes.prepare(Pass(tuple(row.row for row in rows), full=False), ended=True)
        result = await self._passes.execute(ready, smaller if apart else budget)
        if result.exhausted and not apart:
            if len(units := list(as_they_ran(rows))) > 1:
                for unit in units:
                    await self._replay_pass(unit, apart=False)
                return
            result = await self._passes.execute(ready, smaller)
        if result.exhausted:
            await self._replay_exhausted(rows, result)
            return
        passed = []
        for row, output in zip(rows, result.outputs, strict=True):
            if isinstance(output, Failure):
                self._failed[model_of(row.row)] = _unrepeated(row.row, output.message)
            else:
                passed.append((row.row, output))
                self._worked(model_of(row.row))
        await self._compare(passed)

    async def _replay_exhausted(self, rows: Sequence[RanRow], result: PassResult) -> None:
        """Replay each request alone, and again if there may be memory for it later."""
        if len(rows) > 1:
            for row in rows:
                await self._replay_pass([row], apart=True)
            return
        (row,), (output,) = rows, result.outputs
        assert isinstance(output, Failure), "an exhausted pass has no other results"
        if await self._wait([model_of(row.row)], output.message):
            await self._replay_pass(rows, apart=True)
        else:
            self._failed[model_of(row.row)] = _unrepeated(row.row, output.message)

    async def _compare(self, passed: Sequence[tuple[QueuedRow, PassOutput]]) -> None:
        """Compare the logprobs with the delivered ones, if these are still stored."""
        ids = [row.request_id for row, _ in passed]
        read = partial(outcomes.find_many, request_ids=ids)
        found = await persistently(self._store.fetch, read)
        delivered = {
            outcome.request_id: outcome.body
            for outcome in found
            if outcome.body is not None and outcome.status is FutureStatus.DONE
        }
        pairs = [(row, output) for row, output in passed if row.request_id in delivered]
        size = sum(map(len, delivered.values()))
        gaps = await off_loop(size, lambda: [_gap(each, delivered[row.request_id]) for row, each in pairs])
        for (row, _), gap in zip(pairs, gaps, strict=True):
            if not gap <= TOLERANCES[self._trainer.spec.dtype]:  # NaN is beyond, too
                _log.error("model %s: replayed logprobs differ by %.3g on average", row.model_key, gap)
                self.differences += 1
                self._drift_monitor.note_replay(model_of(row))

    async def _replay_steps(self, rows: Sequence[QueuedRow]) -> None:
        if not rows:
            return
        ids = [row.id for row in rows]
        bodies = await persistently(self._store.fetch, partial(queue.read_bodies, ids=ids, ended=True))
        left = {model_of(row): (row, step_item(row, bodies[row.id])) for row in rows}
        while left:
            outputs = await self._trainer.optim_step([step for _, step in left.values()])
            short: dict[ModelKey, str] = {}
            for (model, (row, _)), output in zip(left.items(), outputs, strict=True):
                if output.error is None:
                    self._worked(model)
                    continue
                self._failed[model] = _unrepeated(row, output.error)
                if output.exhausted:
                    short[model] = output.error
            again = await self._wait(list(short), next(iter(short.values()))) if short else []
            left = {model: left[model] for model in again}
            for model in again:
                del self._failed[model]


def _gap(output: PassOutput, body: bytes) -> float:
    """Return the mean absolute difference of a pass's logprobs from those in a result."""
    delivered = pass_results.all_logprobs(body)
    known = np.isfinite(delivered)
    found = np.concatenate([array.ravel() for array in output.logprobs])[known]
    return float(np.abs(found - delivered[known]).mean()) if known.any() else 0.0


def _unrepeated(row: QueuedRow, why: str) -> str:
    return f"request {row.seq_id} could not be replayed: {cause_of(why)}"
