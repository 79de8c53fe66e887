"""Return of models to fresh ranks, as they were created or from their snapshots, several at once.

A model without units since its snapshot sleeps: it comes back before its next unit, or while the trainer is
idle.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sqlalchemy import Connection

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.domain.values import LoraSpec
from skyrl_tinker.engine.colocation.placement import Placement
from skyrl_tinker.engine.outbox import AWAY_S, persistently
from skyrl_tinker.engine.parity.probe import prove_ranks
from skyrl_tinker.engine.parity.startup_check import MODEL as PROBE
from skyrl_tinker.engine.recovery.snapshot_keeper import SnapshotKeeper
from skyrl_tinker.engine.trainer.model_creation import optimizer_family
from skyrl_tinker.errors import (
    SEND_AGAIN,
    DiskFullError,
    ExhaustedError,
    SkyrlTinkerError,
    StorageAwayError,
    StorageError,
    TrainerError,
)
from skyrl_tinker.store import model_records
from skyrl_tinker.store.model_records import ModelRow
from skyrl_tinker.store.replay import snapshot_records, unit_records
from skyrl_tinker.store.replay.snapshot_records import SnapshotRow
from skyrl_tinker.store.replay.unit_records import RanRow
from skyrl_tinker.store.store import Store
from skyrl_tinker.system.off_loop import in_disk_thread
from skyrl_tinker.training.trainer_group import TrainerGroup

TRIES = 4
"""Most tries of work for which a disk or memory fails, as either may for some seconds."""
AT_ONCE = 8
"""Models that come back concurrently: files are fetched and checked while the ranks load other models.

Where trainer and samplers share devices, the samplers may have them after each so many.
"""
WAKES = 2
"""Most consecutive deaths of the ranks while a model comes back: first among others, then alone."""
DIE_EACH_TIME = "the trainer's processes die each time that it is brought back"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Returns:
    """Models that did not come back: those that cannot, with the reasons, and those to be tried again.

    `seconds`: of the trainer's phases.
    """

    failed: Mapping[ModelKey, str]
    later: Mapping[ModelKey, SkyrlTinkerError]
    seconds: float


@dataclass(frozen=True, slots=True)
class History:
    """Sources of one model: how it was created, its snapshot, and the requests that ran after that."""

    model: ModelRow
    snapshot: SnapshotRow | None
    rows: Sequence[RanRow]  # run after the snapshot, in order

    @classmethod
    def read(cls, conn: Connection, model: ModelRow) -> "History":
        snapshot = snapshot_records.find(conn, model.key)
        after = 0 if snapshot is None else snapshot.seq_id
        return cls(model, snapshot, unit_records.ran_after(conn, model.key, after))

    def can_sleep(self, *, stored: bool) -> bool:
        """Return whether the model needs only a load of available files: call it in a thread.

        False for full parameters: a new model must not take their memory meanwhile. `stored`: snapshots are
        in a storage, too.
        """
        if self.rows or self.model.spec.rank == 0:
            return False
        try:
            return stored or self.is_here()
        except OSError:  # the disk fails: load it now, with retries
            return False

    def is_here(self) -> bool:
        """Return whether its files are on this host: call it in a thread. Raises OSError."""
        return self.snapshot is None or Path(self.snapshot.directory).exists()

    def may_be_here(self) -> bool:
        """Return whether its files are on this host, or the disk fails: call it in a thread."""
        with suppress(OSError):  # the load reports the error
            return self.is_here()
        return True


@dataclass(frozen=True, slots=True)
class Begun:
    """Models that are back, those that cannot come back, with the reasons, and the number that sleep."""

    back: Sequence[History]
    failed: Mapping[ModelKey, str]
    asleep: int

    @property
    def models(self) -> int:
        return len(self.back) + len(self.failed) + self.asleep


class ModelReturns:
    """The models that the ranks must have, and those of them that sleep."""

    def __init__(
        self,
        store: Store,
        trainer: TrainerGroup,
        snapshots: SnapshotKeeper,
        placement: Placement,
        names: Collection[str],
    ) -> None:
        """`names`: of the base model."""
        self._store = store
        self._read = partial(_histories, names=names)
        self._trainer = trainer
        self._snapshots = snapshots
        self._placement = placement
        self._asleep: dict[ModelKey, History] = {}
        self._tries = Counter[ModelKey]()  # consecutive failed tries without a death
        self._deadly = Counter[ModelKey]()  # consecutive deaths of the ranks while it came back

    async def begin(self, wanted: Collection[ModelKey]) -> Begun:
        """Bring back all models that are ready and do not sleep, as none of `wanted` does, on empty ranks.

        Waits while storage is away. Raises TrainerError if the ranks die: call it again on fresh ones.
        """
        self._tries.clear()
        found = await persistently(self._store.fetch, self._read)
        for model in self._deadly.keys() - {history.model.key for history in found}:  # parked, or ended
            del self._deadly[model]
        failed = {model: DIE_EACH_TIME for model, deaths in self._deadly.items() if deaths >= WAKES}
        found = [history for history in found if history.model.key not in failed]
        idle = [history for history in found if history.model.key not in wanted]
        stored = self._snapshots.stored
        sleepers = await in_disk_thread(lambda: [each for each in idle if each.can_sleep(stored=stored)])
        self._asleep = {history.model.key: history for history in reversed(sleepers)}  # the newest first
        histories = [history for history in found if history.model.key not in self._asleep]
        seconds, left = 0.0, histories
        while left:
            returns = await self._bring_back(left)
            seconds += returns.seconds
            failed |= returns.failed
            left = [history for history in left if history.model.key in returns.later]
            if left:
                why = next(iter(returns.later.values()))
                _log.warning("%d models are tried again in %.0f s: %s", len(left), AWAY_S, why)
                await asyncio.sleep(AWAY_S)
        if all(history.model.spec.rank for history in histories):  # full parameters would distort the mean
            self._snapshots.work.of_model.note(seconds, len(histories))
        back = [history for history in histories if history.model.key not in failed]
        return Begun(back, failed, len(self._asleep))

    def sleeps(self, model: ModelKey) -> bool:
        return model in self._asleep

    def asleep(self) -> list[ModelKey]:
        """Return the sleeping models, the newest first."""
        return list(self._asleep)

    def forget(self, model: ModelKey) -> None:
        """Forget a sleeping model that has ended."""
        self._asleep.pop(model)
        del self._tries[model], self._deadly[model]

    async def elsewhere(self, models: Sequence[ModelKey]) -> list[ModelKey]:
        """Return those of these sleeping models whose files are not on this host."""
        sleepers = [self._asleep[model] for model in models]
        return await in_disk_thread(lambda: [each.model.key for each in sleepers if not each.may_be_here()])

    async def fetch(self, model: ModelKey) -> None:
        """Fetch a sleeping model's files. Raises StorageError; StorageAwayError if a later try may help."""
        history = self._asleep.get(model)
        if history is not None and history.snapshot is not None:
            await self._snapshots.fetch(history.snapshot)

    async def wake(self, models: Sequence[ModelKey]) -> Returns:
        """Bring back sleeping models. Raises TrainerError if the ranks die; the models then still sleep."""
        returns = await self._bring_back([self._asleep[model] for model in models])
        for model in models:
            history = self._asleep.pop(model)
            if model in returns.later:
                self._asleep[model] = history  # after the others
        return returns

    async def _bring_back(self, histories: Sequence[History]) -> Returns:
        """Create models, and load the snapshots of those that have one, AT_ONCE in a context of the trainer.

        Models during whose return the ranks died come before the others, one by one, on ranks that work.
        Raises TrainerError if the ranks die.
        """
        failed, later = dict[ModelKey, str](), dict[ModelKey, SkyrlTinkerError]()
        begun, seconds = set[ModelKey](), 0.0

        async def bring_back(history: History) -> None:
            model, snapshot = history.model.key, history.snapshot
            try:
                if snapshot is not None:  # first: a wait for storage then holds no memory of the ranks
                    await self._snapshots.fetch(snapshot)
                if self._trainer.broken is not None:  # not of this return
                    raise self._trainer.broken
                begun.add(model)
                await self._make(history)
            except TrainerError:
                raise
            except SkyrlTinkerError as error:
                await self._trainer.release(model)
                if self._may_work_later(model, error):
                    later[model] = error
                else:
                    failed[model] = cause_of(str(error))
            begun.discard(model)
            if model not in later:
                del self._tries[model], self._deadly[model]

        suspects = [history for history in histories if self._deadly[history.model.key]]
        others = [history for history in histories if history not in suspects]
        groups = [others[first : first + AT_ONCE] for first in range(0, len(others), AT_ONCE)]
        if suspects:
            async with self._placement.training():
                await self._prove_ranks()
        for together in *([history] for history in suspects), *groups:
            async with self._placement.training():
                began = time.monotonic()
                try:
                    async with asyncio.TaskGroup() as tasks:
                        for history in together:
                            tasks.create_task(bring_back(history))
                except ExceptionGroup as group:
                    self._deadly.update(begun)
                    _, defects = group.split(TrainerError)
                    raise defects or group.exceptions[0] from None
                seconds += time.monotonic() - began
        return Returns(failed, later, seconds)

    async def _make(self, history: History) -> None:
        model, snapshot = history.model, history.snapshot
        await self._trainer.create_model(model.key, model.spec, optimizer_family(model.optimizer_config))
        if snapshot is not None:
            await self._trainer.load_state(model.key, snapshot.directory, optimizer=snapshot.optimizer)

    async def _prove_ranks(self) -> None:
        """Have the ranks work for a model of no client: if they die of it, too, no other one is to blame."""
        with suppress(ExhaustedError):
            await self._trainer.create_model(PROBE, LoraSpec(rank=8, seed=0))
            await prove_ranks(self._trainer, PROBE)
        await self._trainer.release(PROBE)

    def _may_work_later(self, model: ModelKey, error: SkyrlTinkerError) -> bool:
        """Count a failed try, unless storage is away; return whether a later one may help."""
        if isinstance(error, DiskFullError | StorageAwayError):
            return True
        self._tries[model] += 1
        return isinstance(error, StorageError | ExhaustedError) and self._tries[model] < TRIES


def cause_of(why: str) -> str:
    """Return a failure's text without the advice to send the request again."""
    return why.replace(SEND_AGAIN, "")


def _histories(conn: Connection, names: Collection[str]) -> list[History]:
    return [History.read(conn, model) for model in model_records.list_ready(conn, names)]
