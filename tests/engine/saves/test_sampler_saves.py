"""Saves of several models cost the trainer one capture and one probe. Trainer and samplers are scripted."""

import asyncio
import shutil
from collections import defaultdict
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import orjson
import pytest
from sqlalchemy import select
from sqlalchemy.exc import OperationalError

from skyrl_tinker.domain.ids import FutureStatus, ModelKey, RequestKind
from skyrl_tinker.domain.values import Failure, LoraSpec
from skyrl_tinker.engine import outbox
from skyrl_tinker.engine.outbox import Outbox
from skyrl_tinker.engine.parity.drift_monitor import METRIC, DriftMonitor
from skyrl_tinker.engine.parity.warning_board import WarningBoard
from skyrl_tinker.engine.saves.sampler_saves import Publisher, SamplerSave, _insert_versions
from skyrl_tinker.engine.telemetry.engine_metrics import Metrics
from skyrl_tinker.engine.unit_commits import PendingWrites, UnitCommits, UnitEnd
from skyrl_tinker.errors import StorageError
from skyrl_tinker.protocol.schemas.console import StepMeasures
from skyrl_tinker.protocol.stored_requests import SaveSamplerBody
from skyrl_tinker.storage.storage_port import LOCAL_DISK, Storage
from skyrl_tinker.store import model_records, weight_versions
from skyrl_tinker.store.console import step_points
from skyrl_tinker.store.database.tables import AdapterVersion, SavedCheckpoint
from skyrl_tinker.store.doorbell import Doorbell
from skyrl_tinker.store.futures import queue
from skyrl_tinker.store.futures.record import Accepted
from skyrl_tinker.store.store import Store
from tests.engine.support import journal
from tests.engine.support.world import FACTS
from tests.support.failures import failing_first
from tests.support.reads import reading
from tests.support.scripted_samplers import ScriptedSamplers
from tests.support.scripted_trainer import ScriptedTrainer, Trained
from tests.support.waiting import until

TOKENS = 4
MEASURED = StepMeasures(**dict.fromkeys(step_points.NAMES, 0.5) | {"tokens": 7, "datums": 2})
FULL = LoraSpec(0, 1)
INFLIGHT = {"sampling_session_seq_id": 0, "kind": "inflight"}


class World:
    def __init__(self, store: Store, bell: Doorbell, tmp_path: Path, *, sampled: bool = True) -> None:
        self.store = store
        self.trainer, self.samplers = ScriptedTrainer(defaultdict(Trained)), ScriptedSamplers()
        self.trainer.logprob_of = lambda _: -1.0
        samplers: Any = self.samplers if sampled else None
        ends, metrics = (cast(Any, self.trainer), samplers), Metrics()
        results = Outbox(store, bell, metrics)
        self.gaps = DriftMonitor(WarningBoard(store), *ends, FACTS, metrics, tokens=TOKENS, bound=1.0)
        self.commits = UnitCommits(results)
        self.written: list[int] = []
        flow = store, ends[0], self.commits, PendingWrites(), tmp_path / "disk", LOCAL_DISK
        others = samplers, tmp_path / "ram", self.gaps, partial(metrics.published, FACTS.name)
        self.publisher = Publisher(*flow, *others, lambda row: self.written.append(row.id))

    async def submit(self, spec: LoraSpec | None = None, **body: Any) -> tuple[ModelKey, Accepted]:
        """The save of a new model, unnamed unless `body` names it."""
        created = await journal.submit_create(self.store, await journal.new_session(self.store))
        assert created.model_id is not None
        key = await journal.key_of(self.store, created.model_id)
        if spec is not None:
            await self.store.write(lambda conn: model_records.set_spec(conn, key, spec, {}))
        content = SaveSamplerBody(**(body or {"sampling_session_seq_id": 0})).to_bytes()
        kind = RequestKind.SAVE_WEIGHTS_FOR_SAMPLER
        return key, await journal.submit(self.store, created.model_id, 1, kind, content)

    async def run(self) -> None:
        """All that were submitted, in one unit, to the last answer and comparison."""
        queued = await self.store.read(lambda conn: queue.queued_after(conn, 0))
        rows = [row for row in queued if row.kind is RequestKind.SAVE_WEIGHTS_FOR_SAMPLER]
        committing = asyncio.create_task(self.commits.run())
        async with asyncio.TaskGroup() as background:
            captured = await self.publisher.capture_rows(rows)
            failures = {row_id: save for row_id, save in captured.items() if isinstance(save, Failure)}
            saves = [save for save in captured.values() if isinstance(save, SamplerSave)]
            await self.commits.add(UnitEnd(failures))
            start = background.create_task
            await self.publisher.publish(saves, lambda _, work: start(work), start)
        committing.cancel()

    async def answered(self, accepted: Accepted) -> Any:
        await until(
            lambda: journal.outcome(self.store, accepted),
            lambda found: found.status is not FutureStatus.PENDING,
        )
        return await self.answer(accepted)

    async def answer(self, accepted: Accepted) -> Any:
        return orjson.loads((await journal.outcome(self.store, accepted)).body or b"")


@pytest.fixture
def world(store: Store, bell: Doorbell, tmp_path: Path) -> World:
    return World(store, bell, tmp_path)


def size_of(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.iterdir())


async def test_several_models_share_one_capture_one_commit_and_one_probe(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves = [await world.submit() for _ in range(3)]
    write, numbered = world.store.write, list[bool]()

    async def counted(op: Any, *options: Any) -> Any:
        numbered.append(isinstance(op, partial) and op.func is _insert_versions)
        return await write(op, *options)

    monkeypatch.setattr(world.store, "write", counted)
    keys = [key for key, _ in saves]
    await world.run()
    assert [list(durable) for durable in world.trainer.asked("weights")] == [keys]
    assert world.trainer.asked("pass") == [[(key, False) for key in keys]]
    assert numbered.count(True) == 1
    sessions = {(await world.answer(accepted))["sampling_session_id"] for _, accepted in saves}
    assert len(sessions) == len(saves)
    kept = await world.store.read(weight_versions.list_ephemeral_versions)
    sizes = await world.store.read(weight_versions.ephemeral_sizes)
    assert sizes == {version.id: size_of(Path(version.directory)) for version in kept}
    assert len(sizes) == len(saves)
    assert all(sizes.values())
    usage = await world.store.read(weight_versions.ephemeral_usage)
    assert {each.model_key: each.size_bytes for each in usage} == dict(zip(keys, sizes.values(), strict=True))
    assert [world.gaps.pop_metrics(key) for key in keys] == [{METRIC: 0.5}] * 3


@pytest.mark.parametrize("body", [{"sampling_session_seq_id": 0}, {"name": "best"}])
async def test_weights_know_their_steps_not_those_of_the_moment_in_which_they_are_recorded(
    world: World, body: dict[str, Any]
) -> None:
    key, _ = await world.submit(**body)
    for seq_id in (0, 2, 3):  # the save has 1
        point = partial(step_points.add, model=key, seq_id=seq_id, at=1.0, measured=MEASURED)
        await world.store.write(point)
    await world.run()
    with reading(world.store) as conn:
        assert conn.scalars(select(AdapterVersion.steps)).all() == [1]
        assert conn.scalars(select(SavedCheckpoint.steps)).all() == [1] * ("name" in body)


class StorageDown(Storage):
    def store(self, directory: Path) -> None:
        raise StorageError("down")


async def test_what_fails_in_one_save_is_its_own(world: World) -> None:
    """One on the trainer, one behind it."""
    full, lost, fine = await world.submit(FULL), await world.submit(name="best"), await world.submit()
    world.trainer.unwritable = {full[0]}
    world.publisher._storage = StorageDown()
    await world.run()
    assert world.trainer.held == []
    assert len(set(world.written)) == 3, "also those that failed"
    assert await journal.error_of(world.store, full[1]) == Failure("the disk is broken", "server")
    assert await journal.error_of(world.store, lost[1]) == Failure("down", "server")
    assert (await world.answer(fine[1]))["type"] == "save_weights_for_sampler"
    assert [world.gaps.pop_metrics(key) for key, _ in (full, lost, fine)] == [{}, {}, {METRIC: 0.5}]


async def test_saves_for_which_there_is_no_memory_together_are_captured_one_by_one(world: World) -> None:
    (short, bad), (key, fine) = await world.submit(), await world.submit()
    world.trainer.short = {short}
    await world.run()
    assert await journal.error_of(world.store, bad) == Failure("no memory", "server")
    assert (await world.answer(fine))["type"] == "save_weights_for_sampler"
    assert [list(durable) for durable in world.trainer.asked("weights")] == [[short, key], [short], [key]]
    assert world.trainer.held == []


async def test_weights_that_are_gone_are_written_again_once_there_is_memory(world: World) -> None:
    key, _ = await world.submit()
    with reading(world.store) as conn:
        (row,) = [row for row in queue.queued_after(conn, 0) if row.seq_id == 1]
        model = model_records.by_key(conn, key)
    await world.run()
    (version,) = await world.store.read(weight_versions.list_ephemeral_versions)
    shutil.rmtree(version.directory)
    world.trainer.short = {key}
    await world.publisher.restore(row, model)
    world.trainer.short = set()
    await world.publisher.restore(row, model)
    assert size_of(Path(version.directory)) > 0
    assert world.trainer.held == []


async def test_idle_samplers_take_full_weights_from_the_ranks_before_there_are_files(world: World) -> None:
    """The answer still waits for the files; and what is captured stays until the samplers have it."""
    world.samplers.takes_captured = True
    world.trainer.disk.clear()
    world.samplers.going_on.clear()
    key, saved = await world.submit(FULL)
    running = asyncio.create_task(world.run())
    await until(lambda: world.samplers.taken == ["ranks, without files"])
    assert (await journal.outcome(world.store, saved)).status is FutureStatus.PENDING
    world.trainer.disk.set()
    assert (await world.answered(saved))["type"] == "save_weights_for_sampler"
    assert (world.trainer.held, world.written) == ([key], [])
    world.samplers.going_on.set()
    await running
    assert (world.trainer.held, len(world.written), world.samplers.lent) == ([], 1, {})


async def test_running_rollouts_take_full_weights_from_the_ranks_when_the_save_is_recorded(
    world: World,
) -> None:
    world.samplers.takes_captured = True
    full = await world.submit(FULL, **INFLIGHT)
    await world.run()
    assert world.samplers.taken == ["ranks, with files"]
    assert (await world.answer(full[1]))["type"] == "save_weights_for_sampler"
    assert world.trainer.held == []


@pytest.mark.parametrize("body", [{"sampling_session_seq_id": 0}, INFLIGHT, {"name": "best"}])
async def test_what_cannot_come_from_the_ranks_is_freed_once_it_is_in_files(
    world: World, body: dict[str, Any]
) -> None:
    """Adapters, named weights, and all weights that travel as files."""
    world.samplers.takes_captured = body == {"name": "best"}
    await world.submit(FULL, **body)
    await world.submit(LoraSpec(8, 1), **body)
    await world.run()
    assert set(world.samplers.taken) <= {"files, with files"}
    assert (world.trainer.held, len(set(world.written))) == ([], 2)


async def test_a_save_that_fails_takes_its_weights_back_from_the_samplers(world: World) -> None:
    world.samplers.takes_captured = True
    key, saved = await world.submit(FULL)
    world.trainer.unwritable = {key}
    await world.run()
    assert await journal.error_of(world.store, saved) == Failure("the disk is broken", "server")
    assert (world.trainer.held, world.samplers.lent) == ([], {})


@pytest.mark.parametrize(("module", "name"), [(weight_versions, "publish_version"), (queue, "read_bodies")])
async def test_a_database_that_fails_for_a_moment_costs_no_save(
    world: World, monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str
) -> None:
    failures = [OperationalError("UPDATE", None, OSError("disk full"))]
    monkeypatch.setattr(module, name, failing_first(getattr(module, name), failures))
    monkeypatch.setattr(outbox, "RETRY_S", 0.01)
    _, saved = await world.submit()
    await world.run()
    assert failures == []
    assert (await world.answer(saved))["type"] == "save_weights_for_sampler"


@pytest.mark.parametrize("spec", [None, FULL])
async def test_without_samplers_weights_are_only_written(
    store: Store, bell: Doorbell, tmp_path: Path, spec: LoraSpec | None
) -> None:
    """Also unnamed ones, which were accepted while there were samplers."""
    world = World(store, bell, tmp_path, sampled=False)
    _, unnamed = await world.submit(spec)
    _, inflight = await world.submit(spec, **INFLIGHT)
    _, named = await world.submit(spec, name="a")
    await world.run()
    assert (await world.answer(named))["path"].endswith("/sampler_weights/a")
    for accepted in (unnamed, inflight):
        assert (await world.answer(accepted))["sampling_session_id"]
    for version in await store.read(weight_versions.list_ephemeral_versions):
        assert size_of(Path(version.directory)) > 0
    assert world.trainer.asked("pass") == []
    assert len({*world.written}) == 3
