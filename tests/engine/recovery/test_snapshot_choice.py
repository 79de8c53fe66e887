"""When snapshots are due is known without a look at all models, and is the same as with one."""

import asyncio
import itertools
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_tinker.config import Recovery
from skyrl_tinker.domain.ids import Effect, ModelKey, RequestKind
from skyrl_tinker.engine.recovery.snapshot_keeper import SnapshotKeeper
from skyrl_tinker.engine.unit_commits import UnitEnd
from skyrl_tinker.errors import SkyrlTinkerError
from skyrl_tinker.storage.storage_port import LOCAL_DISK
from skyrl_tinker.store.futures.queue import QueuedRow
from skyrl_tinker.store.replay.snapshot_records import SnapshotRow
from tests.engine.support.rows import queued

MODELS = 4
models = st.integers(0, MODELS - 1).map(ModelKey)
runs = st.tuples(st.just("run"), st.lists(models, min_size=1, unique=True), st.sampled_from([None, *Effect]))
others = st.tuples(st.sampled_from(["load", "pause", "read"]), models, st.none())
whole = st.tuples(st.sampled_from(["reset", "capture", "store", "fail"]), st.none(), st.none())


class State:
    """Stands for the captured state of a model."""

    async def drop(self) -> None:
        pass


class Ranks:
    """Stands for the trainer and for the commits of its units. Snapshots are stored once they `go_on`."""

    def __init__(self) -> None:
        self.captured = self
        self.go_on, self.fails = asyncio.Event(), False

    def size(self, model: ModelKey, *, optimizer: bool) -> int:
        return 1

    def fitting(self, sizes: list[int]) -> int:
        return len(sizes)

    async def capture_states(self, keys: list[ModelKey], most: int) -> dict[ModelKey, State]:
        return {key: State() for key in keys}

    async def persist_state(self, state: State, directory: str) -> None:
        await self.go_on.wait()
        if self.fails:
            raise SkyrlTinkerError("no space is left")

    async def add(self, end: UnitEnd) -> None:
        pass


class Looks(dict[ModelKey, Any]):
    """Work of all models, of which each look at all is counted."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def items(self) -> Any:
        self.count += 1
        return super().items()

    def values(self) -> Any:
        self.count += 1
        return super().values()


class Keeper(SnapshotKeeper):
    """Keeps no files, and nothing in a store."""

    def __init__(self, ranks: Ranks, root: Path, replay_s: float = 1e9) -> None:
        nothing, recovery = cast(Any, None), Recovery(replay_s=replay_s, snapshot_share=0.99)
        self.saving: dict[ModelKey, int] = {}  # by model the seq_id of a save that is not answered

        def saves_until(model: ModelKey, seq_id: int) -> bool:
            return self.saving.get(model, seq_id + 1) <= seq_id

        others = root, _keep, LOCAL_DISK, recovery, saves_until
        super().__init__(nothing, cast(Any, ranks), cast(Any, ranks), *others)
        self._numbers = itertools.count(1)
        self.looks = self.work.by_model = Looks()

    def run(self, keys: list[ModelKey], effect: Effect | None, seconds: float = 0.1) -> None:
        rows = [self.row(key) for key in keys]
        self.work.note(rows, {row.id: effect for row in rows}, seconds)

    def row(self, key: ModelKey, kind: RequestKind = RequestKind.OPTIM_STEP) -> QueuedRow:
        number = next(self._numbers)
        return queued(number, key, number, kind)

    def summed(self) -> float:
        """Seconds of a replay, by a look at all models."""
        return sum(
            self.work.of_model.mean_s + each.requests * self.work.of_request.mean_s + each.ranks_ns / 1e9
            for each in self.work.by_model.values()
            if each.requests
        )

    async def stored(self) -> None:
        if self._writing:
            await asyncio.wait(self._writing.values())

    async def discard(self, row: SnapshotRow) -> None:
        pass

    async def _forget_before(self, model: ModelKey, row: SnapshotRow) -> None:
        pass


async def _keep(model: ModelKey) -> None:
    pass


async def replayed(history: list[tuple[str, Any, Any]], root: Path) -> None:
    ranks = Ranks()
    keeper = Keeper(ranks, root)
    for number, (what, which, effect) in enumerate(history):
        if what == "run":
            keeper.run(which, effect, 0.1 * number)
        elif what == "read":
            keeper.work.crowded([keeper.row(which, RequestKind.FORWARD)])
        elif what == "load":
            keeper.loaded(which, SnapshotRow(number, "", optimizer=True))
        elif what == "pause":
            keeper.pause(which)
        elif what == "reset":
            keeper.reset()
        elif what == "capture":
            ranks.go_on.clear()
            await keeper.take_largest()
        else:
            ranks.fails = what == "fail"
            ranks.go_on.set()
            await keeper.stored()
        work = keeper.work.by_model.values()
        assert keeper.work._all.ranks_ns == sum(each.ranks_ns for each in work)
        assert keeper.work.replay_seconds == pytest.approx(keeper.summed())
    ranks.go_on.set()
    await keeper.stored()


@given(st.lists(st.one_of(runs, others, whole), max_size=40))
@settings(max_examples=100, deadline=None)
def test_any_history(tmp_path_factory: pytest.TempPathFactory, history: list[tuple[str, Any, Any]]) -> None:
    asyncio.run(replayed(history, tmp_path_factory.getbasetemp() / "snapshots"))


async def test_models_are_looked_at_for_a_snapshot_and_not_after_each_unit(tmp_path: Path) -> None:
    ranks = Ranks()
    keeper = Keeper(ranks, tmp_path, replay_s=20.0)
    every = [ModelKey(number) for number in range(4)]
    keeper.run(every, Effect.STEP)
    for _ in range(10):
        await keeper.take_due()
    assert (keeper.looks.count, len(keeper._writing)) == (0, 0), "a replay is short"
    keeper.run(every, Effect.STEP, 10.0)
    await keeper.take_due()
    assert len(keeper._writing) == len(every)
    keeper.run(every, Effect.STEP, 100.0)
    seen = keeper.looks.count
    for _ in range(10):
        await keeper.take_due()
    assert keeper.looks.count == seen, "another is taken only once these are written"
    ranks.go_on.set()
    await keeper.stored()


async def test_a_model_whose_snapshot_an_unfinished_export_bars_lets_others_go_first(tmp_path: Path) -> None:
    ranks = Ranks()
    keeper = Keeper(ranks, tmp_path)
    large, small = ModelKey(0), ModelKey(1)
    ranks.fitting = lambda sizes: 1  # type: ignore[method-assign]
    keeper.saving[large] = 1
    for _ in range(3):  # it trains on, and would have the longest replay each time
        keeper.run([large], Effect.STEP, 100.0)
    assert (keeper.would_help, keeper.owed) == (False, False), "none can be kept"
    keeper.run([small], Effect.STEP)
    await keeper.take_largest()
    assert [*keeper._writing] == [small]
    ranks.go_on.set()
    await keeper.stored()
    assert not keeper.would_help
    del keeper.saving[large]
    await keeper.take_largest()
    assert [*keeper._writing] == [large]
    await keeper.stored()
