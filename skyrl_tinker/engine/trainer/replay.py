"""Replay: brings every model back on fresh ranks, from its snapshot and the units that it ran since.

One that ran nothing since sleeps: it comes back before its next unit, or while the trainer has nothing to do.

It repeats what was committed, in rows of the same size, through the ordinary passes and steps, of many models
at once; outcomes are dropped, since their clients have them. On one CPU rank the models are then the same to
the last bit; elsewhere sums are taken in other orders, and they are close.
"""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from sqlalchemy import Connection

from skyrl_tinker.domain.ids import SAVES, Effect, FutureStatus, ModelKey, ModelState
from skyrl_tinker.domain.values import Failure, PassOutput
from skyrl_tinker.engine.outbox import AWAY_S, persistently
from skyrl_tinker.engine.parity.drift_monitor import DriftMonitor
from skyrl_tinker.engine.parity.probe import trainer_logprobs
from skyrl_tinker.engine.recovery.replay_order import as_they_ran, merged
from skyrl_tinker.engine.recovery.snapshot_keeper import SnapshotKeeper
from skyrl_tinker.engine.scheduling.lanes import model_of
from skyrl_tinker.engine.scheduling.planner import Pass
from skyrl_tinker.engine.trainer.model_creation import optimizer_family
from skyrl_tinker.engine.trainer.optim_steps import step_item
from skyrl_tinker.engine.trainer.pass_preparation import PassCoordinator
from skyrl_tinker.errors import (
    SEND_AGAIN,
    DiskFullError,
    ExhaustedError,
    SkyrlTinkerError,
    StorageAwayError,
    StorageError,
    TrainerError,
)
from skyrl_tinker.off_loop import in_disk_thread, off_loop
from skyrl_tinker.protocol.protobuf import pass_results
from skyrl_tinker.store import model_records
from skyrl_tinker.store.futures import outcomes
from skyrl_tinker.store.futures.queue import QueuedRow
from skyrl_tinker.store.model_records import ModelRow
from skyrl_tinker.store.replay import snapshot_records, unit_records
from skyrl_tinker.store.replay.snapshot_records import SnapshotRow
from skyrl_tinker.store.replay.unit_records import RanRow
from skyrl_tinker.store.store import Store
from skyrl_tinker.training.trainer_group import PassResult, TrainerGroup
from skyrl_tinker.training.trainer_spec import retry_budget

ATTEMPTS = 3
"""Times that a request may kill the ranks when replayed: first as it ran, then alone in smaller rows."""
TRIES = 4
"""Times that something is tried for which a disk or memory fails: either may for some seconds."""
AT_ONCE = 8
"""Models that come back at once: files of some are fetched and checked while the ranks load others."""
WAKES = 2
"""Times on end that the ranks may die while a model that slept comes back: first among others, then alone."""
REPORT_S = 0.5
TOLERANCES = {"float32": 1e-4, "bfloat16": 0.03}
"""Mean difference of a pass's logprobs from those delivered, from which its model says so; by trainer dtype.

The bounds of scripts/gpu-check after some steps: bfloat16 enlarges what weights differ by in a last bit.
"""
_log = logging.getLogger(__name__)

RepeatSaves = Callable[[Sequence[QueuedRow]], Awaitable[None]]
"""Run saves again that had been captured when the ranks died, and were not answered."""
Progress = Callable[[int, int], Awaitable[None]]
"""Called with the units done and all units."""


@dataclass(frozen=True, slots=True)
class ReplayedModels:
    """Models that there were, units replayed for them, and why some could not be brought back.

    `asleep`: how many of them come back when they are asked for.
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
            f"{back} model{'' if back == 1 else 's'} came back, with {units} replayed "
            f"unit{'' if units == 1 else 's'} of work, in {self.seconds:.1f} s{later}"
        )


@dataclass(frozen=True, slots=True)
class Returns:
    """Models that did not come back: those that cannot, with the reasons, and those to try again later."""

    failed: Mapping[ModelKey, str]
    later: Mapping[ModelKey, SkyrlTinkerError]


@dataclass(frozen=True, slots=True)
class _History:
    model: ModelRow
    snapshot: SnapshotRow | None
    rows: Sequence[RanRow]  # that ran after it, in order

    @classmethod
    def read(cls, conn: Connection, model: ModelRow) -> "_History":
        snapshot = snapshot_records.find(conn, model.key)
        after = 0 if snapshot is None else snapshot.seq_id
        return cls(model, snapshot, unit_records.ran_after(conn, model.key, after))

    def can_sleep(self, *, stored: bool) -> bool:
        """Return whether it comes back by a load alone, of files that there are: call it in a thread.

        Not full parameters: room for them must not go to a newcomer meanwhile. `stored`: snapshots are in a
        storage, too.
        """
        if self.rows or self.model.spec.rank == 0:
            return False
        try:
            return stored or self.is_here()
        except OSError:  # of a disk that fails: it is loaded at once, with some patience
            return False

    def is_here(self) -> bool:
        """Return whether its files are on this host: call it in a thread. Raises OSError."""
        return self.snapshot is None or Path(self.snapshot.directory).exists()

    def may_be_here(self) -> bool:
        """Return whether its files are on this host, or cannot be looked for: call it in a thread."""
        with suppress(OSError):  # a load says which
            return self.is_here()
        return True


class Replay:
    def __init__(
        self,
        store: Store,
        trainer: TrainerGroup,
        passes: PassCoordinator,
        snapshots: SnapshotKeeper,
        drift_monitor: DriftMonitor,
        pass_tokens: int,
    ) -> None:
        """`pass_tokens`: bound of a pass of several models."""
        self._store = store
        self._trainer = trainer
        self._passes = passes
        self._snapshots = snapshots
        self._drift_monitor = drift_monitor
        self._pass_tokens = pass_tokens
        self._asleep: dict[ModelKey, _History] = {}
        self._tries = Counter[ModelKey]()  # that failed, on end, without a death
        self._in_vain = False  # models have waited for memory, and nothing had it since
        self._deadly = Counter[ModelKey]()  # deaths of the ranks, on end, while it came back
        self._failed: dict[ModelKey, str] = {}
        self._together = True  # False: the ranks died while units were replayed
        self._deaths = Counter[int]()  # of the ranks while a request was replayed, by the id of its future
        self.units = 0  # replayed so far
        self.differences = 0  # passes whose logprobs were not those delivered

    async def run(
        self, repeat_saves: RepeatSaves, progress: Progress, wanted: Collection[ModelKey] = ()
    ) -> ReplayedModels:
        """Bring back all models that are ready and do not sleep, as none of `wanted` does, on empty ranks.

        Those of requests that kill the ranks each time are not, either.
        Raises TrainerError when the ranks die meanwhile: call it again on fresh ones.
        """
        began = time.monotonic()
        self._failed = {}
        self._tries.clear()
        self._in_vain = False
        self._snapshots.reset()
        found = await persistently(lambda: self._store.fetch(_histories))
        for model in self._deadly.keys() - {history.model.key for history in found}:  # parked, or ended
            del self._deadly[model]
        idle = [history for history in found if history.model.key not in wanted]
        self._asleep = await in_disk_thread(_sleepers, idle, self._snapshots.stored)
        for model in [model for model in self._asleep if self._deadly[model] >= WAKES]:
            del self._asleep[model]
            self._failed[model] = "the trainer's processes die each time that it is brought back"
        left = {history.model.key for history in found} - self._asleep.keys() - self._failed.keys()
        histories = [history for history in found if history.model.key in left]
        begun = time.monotonic()
        await self._bring_all(histories)
        if all(history.model.spec.rank for history in histories):  # not whole models, as large as they are
            self._snapshots.of_model.note(time.monotonic() - begun, len(histories))
        self._together = self._together and not self._deaths
        if histories and not self._together:
            await self._prove_ranks(histories[0].model.key)
        units = await self._repeat(histories, repeat_saves, progress)
        self._deaths.clear()
        self._together = True
        seconds = time.monotonic() - began
        return ReplayedModels(len(found), len(self._asleep), units, seconds, self._failed)

    async def _repeat(
        self, histories: Sequence[_History], repeat_saves: RepeatSaves, progress: Progress
    ) -> int:
        """Repeat what these models ran; return the number of units that it ran in."""
        rows = [row for history in histories for row in history.rows]
        left, reported = Counter(row.unit for row in rows), -math.inf
        began, busy_s = time.monotonic(), self._trainer.busy_s
        together = merged(rows, self._pass_tokens, self._trainer.spec.resident_models)
        for batch in together if self._together else as_they_ran(rows):
            if time.monotonic() - reported > REPORT_S:
                reported = time.monotonic()
                await progress(sum(not count for count in left.values()), len(left))
            await self._replay([row for row in batch if model_of(row.row) not in self._failed], repeat_saves)
            left.subtract(row.unit for row in batch)
        beside_s = time.monotonic() - began - (self._trainer.busy_s - busy_s)
        self._snapshots.of_request.note(max(0.0, beside_s), len(rows))
        self.units += len(left)
        return len(left)

    def sleeps(self, model: ModelKey) -> bool:
        return model in self._asleep

    def asleep(self) -> list[ModelKey]:
        """Return the models that sleep, the newest first."""
        return list(self._asleep)

    def forget(self, model: ModelKey) -> None:
        """Forget a model that slept, and has ended."""
        self._asleep.pop(model)
        del self._tries[model], self._deadly[model]

    async def elsewhere(self, models: Sequence[ModelKey]) -> list[ModelKey]:
        """Return those that sleep while their files are not on this host."""
        sleepers = [self._asleep[model] for model in models]
        return await in_disk_thread(lambda: [each.model.key for each in sleepers if not each.may_be_here()])

    async def fetch(self, model: ModelKey) -> None:
        """Fetch the files of a model that sleeps. Raises StorageError, and StorageAwayError for a while."""
        history = self._asleep.get(model)
        if history is not None and history.snapshot is not None:
            await self._snapshots.fetch(history.snapshot)

    async def wake(self, models: Sequence[ModelKey]) -> Returns:
        """Bring back models that sleep. Raises TrainerError when the ranks die: then they still sleep."""
        returns = await self._bring_back([self._asleep[model] for model in models])
        for model in models:
            history = self._asleep.pop(model)
            if model in returns.later:
                self._asleep[model] = history  # behind the others
        return returns

    async def _bring_all(self, histories: Sequence[_History]) -> None:
        """Bring back all that can be, as long as that takes. Raises TrainerError."""
        left = histories
        while left:
            returns = await self._bring_back(left)
            self._failed |= returns.failed
            left = [history for history in left if history.model.key in returns.later]
            if left:
                why = next(iter(returns.later.values()))
                _log.warning("%d models are tried again in %.0f s: %s", len(left), AWAY_S, why)
                await asyncio.sleep(AWAY_S)

    async def _bring_back(self, histories: Sequence[_History]) -> Returns:
        """Make models as they were created, or as their snapshots have them, several at once.

        Those during whose return the ranks died come before the others, one by one. Raises TrainerError when
        they die.
        """
        failed, later = dict[ModelKey, str](), dict[ModelKey, SkyrlTinkerError]()
        places, begun = asyncio.Semaphore(AT_ONCE), set[ModelKey]()

        async def bring_back(history: _History) -> None:
            model = history.model.key
            async with places:
                begun.add(model)
                try:
                    await self._make(history)
                except TrainerError:
                    raise
                except SkyrlTinkerError as error:
                    await self._trainer.release(model)
                    if self._may_work_later(model, error):
                        later[model] = error
                    else:
                        failed[model] = _cause(str(error))
                begun.remove(model)
                if model not in later:
                    del self._tries[model], self._deadly[model]

        suspects = [history for history in histories if self._deadly[history.model.key]]
        others = [history for history in histories if history not in suspects]
        for together in *([history] for history in suspects), others:
            try:
                async with asyncio.TaskGroup() as tasks:
                    for history in together:
                        tasks.create_task(bring_back(history))
            except ExceptionGroup as group:
                self._deadly.update(begun)
                _, defects = group.split(TrainerError)
                raise defects or group.exceptions[0] from None
        return Returns(failed, later)

    async def _make(self, history: _History) -> None:
        model, snapshot = history.model, history.snapshot
        if snapshot is not None:  # first: it takes no memory while it waits
            await self._snapshots.fetch(snapshot)
        await self._trainer.create_model(model.key, model.spec, optimizer_family(model.optimizer_config))
        if snapshot is not None:
            await self._trainer.load_state(model.key, snapshot.directory, optimizer=snapshot.optimizer)

    def _may_work_later(self, model: ModelKey, error: SkyrlTinkerError) -> bool:
        """Return whether it may come back later: while storage or room is away, and after TRIES - 1 tries."""
        if isinstance(error, DiskFullError | StorageAwayError):
            return True
        return isinstance(error, StorageError | ExhaustedError) and self._may_help(model)

    def _may_help(self, model: ModelKey) -> bool:
        """Count a try that failed; return whether another may help."""
        self._tries[model] += 1
        return self._tries[model] < TRIES

    async def _wait(self, models: Sequence[ModelKey], why: str) -> list[ModelKey]:
        """Wait for memory for those for which another try may help, and return them.

        None does, as all wait for it, once one was waited for in vain and nothing has worked since.
        """
        again = [model for model in models if not self._in_vain and self._may_help(model)]
        if not again:
            self._in_vain = True
        else:
            _log.warning("tried again in %.0f s: %s", AWAY_S, why)
            await asyncio.sleep(AWAY_S)
        return again

    def _worked(self, model: ModelKey) -> None:
        """Note that there was memory."""
        del self._tries[model]
        self._in_vain = False

    async def _prove_ranks(self, model: ModelKey) -> None:
        """Run a trivial pass: if ranks die of that, too, it is not the request. Raises TrainerError."""
        await trainer_logprobs(self._trainer, [model], (0, 0))
        self._trainer.note_work()

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
        self._snapshots.note([row.row for row in rows], effects, self._trainer.busy_s - busy_s)

    async def _replay_pass(self, rows: Sequence[RanRow], *, apart: bool) -> None:
        if not rows:
            return
        budget = rows[0].row_budget or self._trainer.spec.token_budget
        smaller, read = retry_budget(budget), unit_records.read_bodies
        ready = await self._passes.prepare(Pass(tuple(row.row for row in rows), full=False), read)
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
        """Replay each request alone, once more if there may be memory for it later."""
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
        """Compare the logprobs with those that were delivered, where these are still stored."""
        ids = [row.request_id for row, _ in passed]
        read = partial(outcomes.find_many, request_ids=ids)
        found = await persistently(lambda: self._store.fetch(read))
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
        bodies = await persistently(
            lambda: self._store.fetch(lambda conn: unit_records.read_bodies(conn, ids))
        )
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
    """Return the mean difference of a pass's logprobs from those in a result."""
    delivered = pass_results.all_logprobs(body)
    known = np.isfinite(delivered)
    found = np.concatenate([array.ravel() for array in output.logprobs])[known]
    return float(np.abs(found - delivered[known]).mean()) if known.any() else 0.0


def _unrepeated(row: QueuedRow, why: str) -> str:
    return f"request {row.seq_id} could not be replayed: {_cause(why)}"


def _cause(why: str) -> str:
    """Return a failure's text without what is advice for a request alone."""
    return why.replace(SEND_AGAIN, "")


def _sleepers(histories: Sequence[_History], stored: bool) -> dict[ModelKey, _History]:
    """Return those that can sleep, the newest first."""
    return {each.model.key: each for each in reversed(histories) if each.can_sleep(stored=stored)}


def _histories(conn: Connection) -> list[_History]:
    return [_History.read(conn, model) for model in model_records.list_in_states(conn, ModelState.READY)]
