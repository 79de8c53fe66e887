"""Deaths of ranks and engines: what was acknowledged runs once, models are as if nobody had died."""

import asyncio
import errno
import itertools
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import orjson
import pytest
from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError, ProgrammingError

from skyrl_tinker.domain.ids import (
    ALL_OWNERS,
    CheckpointKind,
    FutureStatus,
    ModelId,
    ModelKey,
    ModelState,
    RequestKind,
)
from skyrl_tinker.domain.values import Failure, LoraSpec, PassItem
from skyrl_tinker.engine import outbox
from skyrl_tinker.engine.colocation.placement import Placement
from skyrl_tinker.engine.recovery import leftovers, parking, snapshot_keeper
from skyrl_tinker.engine.recovery.snapshot_keeper import SnapshotKeeper
from skyrl_tinker.engine.recovery.unkept_work import MeanCost
from skyrl_tinker.engine.trainer import model_returns, replay, trainer_driver, unit_execution
from skyrl_tinker.errors import (
    SEND_AGAIN,
    ExhaustedError,
    StorageAwayError,
    StorageError,
    TrainerError,
    TrainerLostError,
)
from skyrl_tinker.protocol.stored_requests import LoadWeightsBody, SaveWeightsBody
from skyrl_tinker.store import checkpoint_records, model_records
from skyrl_tinker.store.checkpoint_records import NewCheckpoint
from skyrl_tinker.store.console import step_points
from skyrl_tinker.store.futures import cancellation, queue
from skyrl_tinker.store.futures.record import Accepted
from skyrl_tinker.store.model_records import ModelRow
from skyrl_tinker.store.replay import snapshot_records, unit_records
from skyrl_tinker.store.replay.snapshot_records import SnapshotRow
from skyrl_tinker.store.store import Store
from skyrl_tinker.training.trainer_group import PassResult
from tests.engine.support import journal
from tests.engine.support.world import MakeWorld, World
from tests.engine.test_ended_sessions import sizes
from tests.support.failures import failing_first
from tests.support.reads import reading
from tests.support.scripted_trainer import ScriptedTrainer

DEAD = TrainerError("rank 0 died")
UNREADABLE = StorageError("checkpoint 1/6 cannot be read: Input/output error")


async def steps_of(world: World, model: ModelId) -> list[list[int]]:
    return world.workers.trained[await journal.key_of(world.store, model)].steps


async def all_done(world: World, *accepted: Accepted) -> None:
    for each in accepted:
        assert (await world.done(each)).status is FutureStatus.DONE


@asynccontextmanager
async def behind_a_pass(world: World, model: ModelId, seq_id: int = 1) -> AsyncIterator[None]:
    """Have what is submitted within run together, after a pass that runs until all of it is taken in."""
    world.workers.go_on.clear()
    blocker = await journal.submit_pass(world.store, model, seq_id)
    await world.until(lambda: world.workers.names()[-1], lambda name: name == "pass")
    yield
    await world.taken_in()
    world.workers.go_on.set()
    await all_done(world, blocker)


async def train(world: World, model: ModelId, first: int, steps: int) -> int:
    """Two passes and a step, so many times; returns the next seq_id."""
    for seq_id in range(first, first + 3 * steps, 3):
        passes = [await journal.submit_pass(world.store, model, seq_id + part) for part in range(2)]
        await all_done(world, *passes, await journal.submit_step(world.store, model, seq_id + 2))
    return first + 3 * steps


def expected(first: int, steps: int) -> list[list[int]]:
    return [[seq_id, seq_id + 1] for seq_id in range(first, first + 3 * steps, 3)]


async def goes_on(world: World, model: ModelId) -> None:
    """Train a model of two steps for one more, on a new engine."""
    after = world.new_engine()
    await train(after, model, 7, 1)
    assert await steps_of(after, model) == expected(1, 3)


@pytest.mark.parametrize("refuses", [False, True])
async def test_what_ran_while_the_ranks_were_lost_runs_on_the_next_ones_or_fails(
    world: World, *, refuses: bool
) -> None:
    """Where there are other base models, the engine goes on with those."""
    lost, restarted = asyncio.Event(), asyncio.Event()

    died = TrainerLostError("rank 0 died; that was the 3rd time")

    async def restart() -> None:
        lost.set()
        await restarted.wait()
        world.workers.broken = None
        world.workers.trained.clear()
        world.driver.requests.accept()

    world.patch.setattr(world.workers, "restart", AsyncMock(side_effect=died))
    world.lost = restart
    model = await world.model()
    next_seq = await train(world, model, 1, 1)
    world.workers.go_on.clear()
    first = await journal.submit_pass(world.store, model, next_seq)
    await world.until(lambda: world.workers.names()[-1], lambda name: name == "pass")
    world.workers.broken = DEAD
    world.workers.go_on.set()
    await world.until(lost.is_set)
    step = await journal.submit_step(world.store, model, next_seq + 1)
    await world.taken_in()
    if refuses:
        await world.driver.requests.refuse("base model tiny does not start: rank 0 died")
        late = await journal.submit_pass(world.store, model, next_seq + 2)
        for each in (first, step, late):
            await world.done(each)
            failure = await journal.error_of(world.store, each)
            told = "base model tiny does not start: rank 0 died; other base models are unaffected"
            assert (failure.category, failure.message) == ("server", told)
        next_seq += 3
    restarted.set()
    if refuses:
        next_step = await journal.submit_step(world.store, model, next_seq)
        await world.done(next_step)
        assert "rank 0 died" in (await journal.error_of(world.store, next_step)).message, "its window failed"
        await train(world, model, next_seq + 1, 1)
        assert await steps_of(world, model) == [*expected(1, 1), *expected(next_seq + 1, 1)]
    else:
        await all_done(world, first, step)
        assert await steps_of(world, model) == [*expected(1, 1), [next_seq]]


async def test_a_pass_that_dies_with_the_ranks_runs_once_more_and_nothing_twice(world: World) -> None:
    model = await world.model()
    await all_done(world, await journal.submit_pass(world.store, model, 1))
    world.workers.broken = DEAD  # before the next unit
    second = await journal.submit_pass(world.store, model, 2)
    step = await journal.submit_step(world.store, model, 3)
    await all_done(world, second, step)
    assert await steps_of(world, model) == [[1, 2]]
    assert world.workers.restarts == 1
    assert world.reports == ["", f"the trainer is restarted: {DEAD}", "replaying 0 of 1 units", ""]


async def test_idle_ranks_that_die_are_replaced_and_everything_replayed(world: World) -> None:
    model = await world.model()
    await train(world, model, 1, 3)
    world.workers.broken = DEAD
    world.driver.wake()
    await world.until(lambda: world.workers.restarts)
    await train(world, model, 10, 1)
    assert await steps_of(world, model) == expected(1, 4)


async def test_a_new_engine_brings_back_models_and_runs_what_was_pending(world: World) -> None:
    model, neighbour = await world.model(), await world.model()
    following = await train(world, model, 1, 2)
    await train(world, neighbour, 1, 1)
    units = [name for name in world.workers.names() if name in ("pass", "step")]
    world.workers.go_on.clear()
    pending = await journal.submit_pass(world.store, model, following)
    parked = await journal.submit_step(world.store, model, following + 1)
    await world.until(lambda: world.workers.names()[-1], lambda name: name == "pass")
    after = world.new_engine()
    await all_done(after, pending, parked)
    assert await steps_of(after, model) == [*expected(1, 2), [following]]
    assert await steps_of(after, neighbour) == expected(1, 1)
    assert (await journal.model_of(world.store, model)).state is ModelState.READY
    (recovery,) = after.driver.view().incidents
    assert recovery.mended
    assert recovery.text.startswith(f"2 models came back, with {len(units)} replayed units of work, in ")


async def test_units_of_several_models_are_replayed_in_the_order_in_which_they_ran(world: World) -> None:
    first, second = await world.model(), await world.model()
    await train(world, second, 1, 1)
    async with behind_a_pass(world, second, 4):
        together = [await journal.submit_pass(world.store, *each) for each in ((first, 1), (second, 5))]
    await all_done(world, *together, await journal.submit_step(world.store, second, 6))
    after = world.new_engine()
    await all_done(after, await journal.submit_step(after.store, first, 2))
    assert await steps_of(after, second) == [[1, 2], [4, 5]]


def replayed(world: World) -> list[tuple[str, int]]:
    """Passes and steps that ran, each with the number of its requests."""
    return [(what, len(asked)) for what, asked in world.workers.told if what in ("pass", "step")]


async def test_units_of_different_models_are_replayed_as_one_and_those_of_one_model_apart(
    world: World,
) -> None:
    """As many clients would run them who send at once; then each trains on as if nothing had been."""
    models = [await world.model() for _ in range(3)]
    for model in models:
        for seq_id in (1, 2):
            await all_done(world, await journal.submit_pass(world.store, model, seq_id))
        await all_done(world, await journal.submit_step(world.store, model, 3))
    await all_done(world, await journal.submit_pass(world.store, models[0], 4))
    assert [count for _, count in replayed(world)] == [1] * 10
    after = world.new_engine()
    await after.until(lambda: after.ready)
    assert replayed(after) == [("pass", 3), ("pass", 3), ("step", 3), ("pass", 1)]
    assert [await steps_of(after, model) for model in models] == [expected(1, 1)] * 3


async def test_a_replayed_pass_is_no_larger_than_one_of_clients(make_world: MakeWorld) -> None:
    before = make_world(unit_tokens=1)
    models = [await before.model() for _ in range(2)]
    await all_done(before, *[await journal.submit_pass(before.store, model, 1) for model in models])
    await before.end()
    after = make_world(unit_tokens=1)
    await after.until(lambda: after.ready)
    assert replayed(after) == [("pass", 1), ("pass", 1)]


async def test_models_are_made_while_the_files_of_others_are_fetched(world: World) -> None:
    models = [await world.model() for _ in range(3)]
    for model in models:
        await train(world, model, 1, 1)
    after = world.new_engine()
    after.workers.go_on.clear()
    await after.until(lambda: after.workers.names().count("create"), len(models).__eq__)
    after.workers.go_on.set()
    await all_done(after, *[await journal.submit_step(world.store, model, 4) for model in models])


def run_passes(world: World) -> list[tuple[set[ModelKey], int | None]]:
    """Note, in the list returned, the models and the row budget of each pass from now on."""
    ran: list[tuple[set[ModelKey], int | None]] = []

    async def run_pass(items: Sequence[PassItem], row_budget: int | None = None) -> PassResult:
        ran.append(({item.model for item in items}, row_budget))
        return await ScriptedTrainer.run_pass(world.workers, items, row_budget)

    world.patch.setattr(world.workers, "run_pass", run_pass)
    return ran


@pytest.mark.parametrize("how", ["deadly", "large"])
async def test_who_is_replayed_with_a_request_that_fails_then_runs_as_before(
    world: World, soon_again: None, how: str
) -> None:
    """In rows of the size in which it ran, without the other: they were in different units."""
    model, bad = await world.model(), await world.model()
    for each in (model, bad):
        await all_done(world, await journal.submit_pass(world.store, each, 1))
    key, bad_key = [await journal.key_of(world.store, each) for each in (model, bad)]
    after = world.new_engine()
    setattr(after.workers, how, {bad_key})
    ran = run_passes(after)
    await after.until(lambda: after.ready)
    assert ran[0] == ({key, bad_key}, 2048)
    assert {budget for models, budget in ran if key in models} - {None} == {2048}  # None: a probe's
    await after.until(lambda: journal.model_of(world.store, bad), _is_parked)
    await all_done(after, await journal.submit_step(world.store, model, 2))
    assert await steps_of(after, model) == [[1]]


async def test_a_pass_is_replayed_in_rows_of_the_size_in_which_it_ran(world: World) -> None:
    """Whatever token_budget is now: in other rows its sums are rounded otherwise."""
    model = await world.model()
    await train(world, model, 1, 1)
    after = world.new_engine()
    after.workers.spec.token_budget = 512
    ran = run_passes(after)
    await all_done(after, await journal.submit_step(after.store, model, 4))
    assert {budget for _, budget in ran} == {2048}


async def test_an_engine_ends_at_a_unit_that_cannot_be_committed_and_the_next_one_runs_it(
    world: World,
) -> None:
    model = await world.model()
    requests = [
        await journal.submit_pass(world.store, model, 1),
        await journal.submit_step(world.store, model, 2),
        await journal.submit_pass(world.store, model, 3),
        await journal.submit_step(world.store, model, 4),
    ]
    with pytest.MonkeyPatch.context() as broken:
        broken.setattr(step_points, "add", Mock(side_effect=ValueError("a bug")))
        with pytest.raises(ExceptionGroup) as ended:
            await world.done(requests[2])
    assert ended.group_contains(ValueError, match="a bug")
    engine = world.new_engine()
    await all_done(engine, *requests)
    assert await steps_of(engine, model) == [[1], [3]]


async def test_a_poisoned_window_is_poisoned_still(world: World) -> None:
    model = await world.model()
    key = await journal.key_of(world.store, model)
    await all_done(world, await journal.submit_pass(world.store, model, 1))
    world.workers.bad_models.add(key)
    await world.done(await journal.submit_pass(world.store, model, 2))
    after = world.new_engine()
    step = await journal.submit_step(world.store, model, 3)
    await after.done(step)
    why = "forward_backward with seq_id 2 failed: loss is not finite"
    assert why in (await journal.error_of(world.store, step)).message
    await train(after, model, 4, 1)
    assert await steps_of(after, model) == [[4, 5]]


async def test_a_window_that_was_cleared_poisons_no_later_one(world: World) -> None:
    model = await world.model()
    world.workers.bad_models.add(await journal.key_of(world.store, model))
    for submitted in (journal.submit_pass(world.store, model, 1), journal.submit_step(world.store, model, 2)):
        await world.done(await submitted)
    world.workers.bad_models.clear()
    await all_done(world, await journal.submit_pass(world.store, model, 3))
    after = world.new_engine()
    await all_done(after, await journal.submit_step(after.store, model, 4))
    assert await steps_of(after, model) == [[3]]


async def test_units_of_a_new_engine_are_numbered_behind_those_of_the_old_one(world: World) -> None:
    """Or two of them would be replayed as one."""
    model = await world.model()
    following = await train(world, model, 1, 1)
    after = world.new_engine()
    await train(after, model, following, 1)
    key = await journal.key_of(world.store, model)
    with reading(world.store) as conn:
        units = {each.row.seq_id: each.unit for each in unit_records.ran_after(conn, key, 0)}
    assert units[following - 1] < units[following]


async def test_refused_requests_keep_their_places(world: World) -> None:
    """The pass that the API refused is older than all that is pending, and its turn had not come."""
    model = await world.model()
    await all_done(world, await journal.submit_pass(world.store, model, 1))
    why = Failure("datum 2: weights has length 3, expected 4", "user")
    await journal.submit(world.store, model, 3, RequestKind.FORWARD_BACKWARD, failure=why)
    after = world.new_engine()
    late = await journal.submit_pass(world.store, model, 2)
    step = await journal.submit_step(world.store, model, 4)
    await all_done(after, late)
    await after.done(step)
    assert why.message in (await journal.error_of(world.store, step)).message


async def test_a_cleared_window_is_not_trained_on_again(world: World) -> None:
    model = await world.model()
    await all_done(world, await journal.submit_pass(world.store, model, 1))
    await journal.submit(world.store, model, 2, RequestKind.OPTIM_STEP, failure=Failure("lr", "user"))
    await all_done(world, await journal.submit_pass(world.store, model, 3))
    after = world.new_engine()
    await all_done(after, await journal.submit_step(world.store, model, 4))
    assert await steps_of(after, model) == [[3]]


async def test_a_request_that_kills_the_ranks_fails_alone(world: World) -> None:
    """It is tried with its neighbours twice, then each by itself."""
    model, deadly = await world.model(), await world.model()
    world.workers.deadly = {await journal.key_of(world.store, deadly)}
    async with behind_a_pass(world, model):
        fine = await journal.submit_pass(world.store, model, 2)
        bad = await journal.submit_pass(world.store, deadly, 1)
        step = await journal.submit_step(world.store, deadly, 2)
    await all_done(world, fine)
    await world.done(bad)
    failure = await journal.error_of(world.store, bad)
    assert failure.category == "server"
    assert failure.message.startswith("rank 0 died in run_pass, also when it was run alone; it changed no")
    assert "in rows of 2048 tokens (token_budget) and of 1024" in failure.message
    await world.done(step)
    assert "rank 0 died in run_pass" in (await journal.error_of(world.store, step)).message
    assert world.workers.restarts == trainer_driver.TOGETHER + trainer_driver.ALONE
    await all_done(world, await journal.submit_step(world.store, model, 3))
    assert await steps_of(world, model) == [[1, 2]]


async def test_a_request_for_which_there_is_no_memory_fails_alone(world: World) -> None:
    """Its neighbours run as they would have without it, and are replayed so."""
    model, large = await world.model(), await world.model()
    world.workers.large = {await journal.key_of(world.store, large)}
    async with behind_a_pass(world, model):
        bad = await journal.submit_pass(world.store, large, 1)
        fine = await journal.submit_pass(world.store, model, 2)
        step = await journal.submit_step(world.store, model, 3)
    await all_done(world, fine, step)
    await world.done(bad)
    assert (await journal.error_of(world.store, bad)).message == "no memory"
    assert 2 in [len(items) for what, items in world.workers.told if what == "pass"]
    after = world.new_engine()
    await train(after, model, 4, 1)
    assert await steps_of(after, model) == [[1, 2], [4, 5]]


async def test_a_step_for_which_there_was_no_memory_is_not_replayed_and_its_gradients_are(
    world: World,
) -> None:
    model = await world.model()
    await all_done(world, await journal.submit_pass(world.store, model, 1))
    world.workers.short = {await journal.key_of(world.store, model)}
    await world.done(await journal.submit_step(world.store, model, 2))
    after = world.new_engine()
    await train(after, model, 3, 1)
    assert await steps_of(after, model) == [[1, 3, 4]]


async def test_a_model_whose_step_cannot_be_replayed_is_parked(world: World, soon_again: None) -> None:
    model = await world.model()
    await train(world, model, 1, 1)
    after = world.new_engine()
    after.workers.short = {await journal.key_of(world.store, model)}
    late = await journal.submit_step(world.store, model, 4)
    await after.done(late)
    assert "request 3 could not be replayed: no memory" in (await journal.error_of(world.store, late)).message


async def test_a_request_that_kills_the_ranks_is_not_told_where_the_servers_files_lie(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    model = await world.model()
    world.workers.failing["step"] = TrainerError("rank 0: '/srv/weights/a.bin' is damaged")
    await all_done(world, await journal.submit_pass(world.store, model, 1))
    step = await journal.submit_step(world.store, model, 2)
    await world.done(step)
    failure = await journal.error_of(world.store, step)
    assert failure.message.startswith("rank 0: …/a.bin is damaged, also when it was run alone")
    assert "'/srv/weights/a.bin' is damaged, also when" in caplog.text


async def test_a_step_that_kills_the_ranks_clears_its_window_and_says_so(world: World) -> None:
    model = await world.model()
    await all_done(world, await journal.submit_pass(world.store, model, 1))
    world.workers.failing["step"] = DEAD
    step = await journal.submit_step(world.store, model, 2)
    await world.done(step)
    assert "rank 0 died, also when it was run alone" in (await journal.error_of(world.store, step)).message
    world.workers.failing.clear()
    await train(world, model, 3, 1)
    assert await steps_of(world, model) == [[3, 4]]


def save(store: Store, model: ModelId, seq_id: int, name: str) -> "asyncio.Future[Accepted]":
    body = SaveWeightsBody(name).to_bytes()
    return asyncio.ensure_future(journal.submit(store, model, seq_id, RequestKind.SAVE_WEIGHTS, body))


@pytest.mark.parametrize("how", ["the ranks die", "the engine dies"])
async def test_a_save_that_was_being_written_has_the_weights_of_its_turn(world: World, how: str) -> None:
    model = await world.model()
    await train(world, model, 1, 1)
    world.workers.disk.clear()
    saving = await save(world.store, model, 4, "0001")
    await train(world, model, 5, 1)
    after = world
    if how == "the engine dies":
        after = world.new_engine()
    else:
        world.workers.broken = DEAD
        world.workers.disk.set()
    await all_done(after, saving)
    with reading(world.store) as conn:
        row = checkpoint_records.find(conn, ALL_OWNERS, model, CheckpointKind.WEIGHTS, "0001")
    assert row is not None
    assert orjson.loads((Path(row.directory) / "steps.json").read_bytes()) == expected(1, 1)
    await train(after, model, 8, 1)
    assert await steps_of(after, model) == [[1, 2], [5, 6], [8, 9]]


async def test_a_save_that_died_before_it_was_recorded_leaves_no_second_copy(world: World) -> None:
    """However often that happens, and the save succeeds."""
    add, attempts, failing = checkpoint_records.add, list[NewCheckpoint](), True

    def fails(conn: Connection, new: NewCheckpoint, *, replace: bool) -> int:
        attempts.append(new)
        if failing:
            raise OperationalError("INSERT", None, OSError("disk full"))
        return add(conn, new, replace=replace)

    world.patch.setattr(checkpoint_records, "add", fails)
    world.patch.setattr(outbox, "RETRY_S", 0.01)
    model = await world.model()
    saving = await save(world.store, model, 1, "a")
    engine = world
    for _ in range(2):
        before = len(attempts)
        await engine.until(lambda: len(attempts), before.__lt__)
        await engine.end()
        await world.store.write(lambda conn: None)  # behind all that the dead one had begun
        engine = engine.new_engine()
    failing = False
    await all_done(engine, saving)
    with reading(world.store) as conn:
        row = checkpoint_records.find(conn, ALL_OWNERS, model, CheckpointKind.WEIGHTS, "a")
    assert row is not None
    saves = leftovers.list_saves(world.root)
    leftovers.remove(await world.store.write(partial(leftovers.list_abandoned, saves=saves)))  # at a start
    assert list(world.root.glob("*/weights/*")) == [Path(row.directory)]


async def snapshot_of(world: World, model: ModelId) -> snapshot_records.SnapshotRow | None:
    key = await journal.key_of(world.store, model)
    return await world.store.read(lambda conn: snapshot_records.find(conn, key))


async def bodies_of(world: World, model: ModelId) -> int:
    """How many requests of the model could be replayed."""
    key = await journal.key_of(world.store, model)
    with reading(world.store) as conn:
        ids = [row.row.id for row in unit_records.ran_after(conn, key, 0)]
        return len(queue.read_bodies(conn, ids, ended=True))


async def test_idle_models_are_kept_and_only_what_came_later_is_replayed(world: World) -> None:
    world.patch.setattr(unit_records, "KEPT_BYTES", 0)
    world.patch.setattr(trainer_driver, "IDLE_S", 0.02)
    model = await world.model()
    world.workers.busy_s = 0.0
    await train_busily(world, model, 1, 2)
    await world.until(lambda: snapshot_of(world, model), lambda row: row is not None and row.seq_id == 6)
    await world.until(lambda: bodies_of(world, model), lambda left: left == 0)
    world.patch.setattr(trainer_driver, "IDLE_S", 60.0)
    await train_busily(world, model, 7, 1)
    after = world.new_engine()
    await train_busily(after, model, 10, 1)
    assert await steps_of(after, model) == expected(1, 4)
    names = after.workers.names()
    assert names[:2] == ["create", "load"]
    assert names.count("step") == 2  # one is replayed, one is new


async def train_busily(world: World, model: ModelId, first: int, steps: int, seconds: float = 1.0) -> None:
    """So that a replay would take time, `seconds` per pass."""
    run_pass = world.workers.run_pass

    async def slow(*args: object) -> object:
        world.workers.busy_s += seconds
        return await run_pass(*args)  # type: ignore[arg-type]

    world.workers.run_pass = slow  # type: ignore[assignment,method-assign]
    await train(world, model, first, steps)
    world.workers.run_pass = run_pass  # type: ignore[method-assign]


async def test_snapshots_of_short_work_have_a_share_of_idle_time(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many models that each do little: the trainer is neither busy nor ever idle for long."""
    clock = SimpleNamespace(monotonic=map(float, itertools.count()).__next__)  # a snapshot takes a second
    monkeypatch.setattr(snapshot_keeper, "time", clock)
    monkeypatch.setattr(trainer_driver, "IDLE_S", 3600.0)
    world = make_world(replay_s=0.001)
    for model in [await world.model() for _ in range(3)]:
        await train_busily(world, model, 1, 1, seconds=0.01)
        await world.until(partial(snapshot_of, world, model), lambda row: row is not None)


async def test_snapshots_count_what_a_replay_takes_beside_the_ranks(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short work of the ranks: a fresh model, and three requests that are read, sent and compared."""
    monkeypatch.setattr(trainer_driver, "IDLE_S", 3600.0)
    world = make_world(replay_s=0.06)
    model = await world.model()
    await train_busily(world, model, 1, 1, seconds=1e-6)
    await world.until(partial(snapshot_of, world, model), lambda row: row is not None)


async def test_what_a_replay_takes_is_known_from_the_last_ones(world: World) -> None:
    models = [await world.model() for _ in range(2)]
    for model in models:
        await train(world, model, 1, 1)
    after = world.new_engine()
    await after.until(lambda: after.ready)
    before, found = world.driver._snapshots.work, after.driver._snapshots.work
    assert found.of_model.times - before.of_model.times == 2
    assert found.of_request.times - before.of_request.times == 6
    assert found.of_model.seconds > before.of_model.seconds


async def test_several_models_are_kept_at_once(world: World) -> None:
    world.patch.setattr(trainer_driver, "IDLE_S", 3600.0)
    models = [await world.model() for _ in range(3)]
    for model in models:
        await train_busily(world, model, 1, 1)
    world.patch.setattr(trainer_driver, "IDLE_S", 0.02)
    world.workers.disk.clear()
    world.driver.wake()
    await world.until(lambda: world.workers.names().count("persist"))
    assert len(world.workers.held) == len(models)
    saving = await save(world.store, models[0], 4, "a")
    await world.until(lambda: world.workers.names().count("persist"), lambda count: count > 1)
    assert len(world.workers.asked("persist")) == 2, "the save of a client waits for one snapshot"
    world.workers.disk.set()
    await all_done(world, saving)
    for model in models:
        await world.until(partial(snapshot_of, world, model), lambda row: row is not None)
    (captured,) = world.workers.asked("captures")
    assert sorted(captured) == [await journal.key_of(world.store, model) for model in models]
    await world.until(lambda: world.workers.held, lambda held: not held)


async def test_a_replay_waits_for_all_that_is_written_though_one_has_failed(world: World) -> None:
    failed, disk = asyncio.Event(), asyncio.Event()

    async def write(keeper: SnapshotKeeper, model: ModelKey, *_: object) -> None:
        if not failed.is_set():
            failed.set()
            raise OSError(errno.EIO, "Input/output error")
        await disk.wait()

    world.patch.setattr(SnapshotKeeper, "_write", write)
    world.patch.setattr(trainer_driver, "IDLE_S", 3600.0)
    for model in [await world.model() for _ in range(2)]:
        await train_busily(world, model, 1, 1)
    world.patch.setattr(trainer_driver, "IDLE_S", 0.02)
    world.driver.wake()
    await failed.wait()
    settled = asyncio.create_task(world.driver._snapshots.settle())
    await asyncio.wait([settled], timeout=0.1)
    assert not settled.done(), "files of the other are still to be recorded"
    disk.set()
    await settled
    first, second = [task.exception() for task in world.driver._snapshots._writing.values()]
    assert isinstance(first, OSError)
    assert second is None


async def test_a_disk_that_cannot_list_older_snapshots_keeps_the_new_one(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    error = OSError(errno.EIO, "Input/output error")
    world.patch.setattr(SnapshotKeeper, "_directories", AsyncMock(side_effect=error))
    model, _ = await with_snapshot(world)
    await world.until(lambda: "may stay until the next one" in caplog.text)
    assert await snapshot_of(world, model)
    await world.driver._snapshots.remove_replaced(
        await journal.key_of(world.store, model)
    )  # as behind a load


def test_what_was_waited_for_in_one_replay_does_not_make_all_later_ones_dear() -> None:
    cost = MeanCost(2.0, 100)
    cost.note(3600.0, 20)
    assert cost.mean_s == pytest.approx(0.05)


@pytest.mark.parametrize(
    "error",
    [
        StorageError("the disk is broken"),
        OperationalError("INSERT", {}, Exception("database or disk is full")),
        ProgrammingError("INSERT", {}, Exception("no such column")),
        ValueError("a bug"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_a_snapshot_that_cannot_be_written_costs_nothing(
    world: World, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    """The log names the fault, and has the traceback of one that nobody foresaw."""
    world.patch.setattr(trainer_driver, "IDLE_S", 0.02)
    world.workers.failing["persist"] = error
    model = await world.model()
    await train_busily(world, model, 1, 1)
    await world.until(lambda: type(error).__name__ in caplog.text)
    await world.until(lambda: world.workers.names().count("captures"), lambda tried: tried > 1)
    world.patch.setattr(trainer_driver, "IDLE_S", 3600.0)
    await world.until(lambda: world.workers.held, lambda held: not held)
    assert ("Traceback" in caplog.text) == isinstance(error, ProgrammingError | ValueError)
    assert not list((world.root.parent / "snapshots").glob("*/*"))
    await train(world, model, 4, 1)
    await goes_on(world, model)


async def test_a_disk_that_cannot_list_snapshots_ends_no_start(world: World) -> None:
    model, _ = await with_snapshot(world)
    error = OSError(errno.EIO, "Input/output error")
    world.patch.setattr(snapshot_keeper, "_of_models", Mock(side_effect=error))
    await goes_on(world, model)


async def test_a_checkpoint_that_was_loaded_may_be_deleted(world: World) -> None:
    model = await world.model()
    await train(world, model, 1, 1)
    await all_done(world, await save(world.store, model, 4, "kept"))
    await train(world, model, 5, 1)
    body = LoadWeightsBody(f"tinker://{model}/weights/kept", optimizer=True).to_bytes()
    await all_done(world, await journal.submit(world.store, model, 8, RequestKind.LOAD_WEIGHTS, body))
    assert world.driver._snapshots.work.replay_seconds == 0.0, "it sleeps, after a death"
    await train(world, model, 9, 1)
    await asyncio.to_thread(shutil.rmtree, world.root)
    after = world.new_engine()
    await train(after, model, 12, 1)
    assert await steps_of(after, model) == [[1, 2], [9, 10], [12, 13]]


async def test_what_a_released_model_had_is_removed(world: World) -> None:
    world.patch.setattr(unit_records, "KEPT_BYTES", 0)
    model = await world.model()
    await train(world, model, 1, 1)
    assert await bodies_of(world, model) == 3
    world.driver.requests.release(await journal.key_of(world.store, model))
    await world.until(lambda: bodies_of(world, model), lambda left: left == 0)


async def test_an_end_whose_files_were_not_removed_leaves_none_to_the_next_engine(world: World) -> None:
    """The engine dies behind the commit, at any moment of the removal."""
    world.patch.setattr(unit_records, "KEPT_BYTES", 0)
    model = await world.model()
    await train(world, model, 1, 1)
    key = await journal.key_of(world.store, model)
    await world.end()
    await world.store.write(lambda conn: model_records.set_state(conn, key, ModelState.RELEASED, "over"))
    kept = world.root.parent / "snapshots" / str(key)
    await asyncio.to_thread((kept / "3.abc").mkdir, parents=True)
    after = world.new_engine()
    await after.model()
    assert await bodies_of(after, model) == 0
    assert not await asyncio.to_thread(kept.exists)


async def test_a_model_waits_for_room_on_the_host_of_a_rank(world: World) -> None:
    """Its snapshot must not be given up for a full disk that is not even the server's."""
    world.patch.setattr(outbox, "AWAY_S", 0.01)
    world.patch.setattr(trainer_driver, "IDLE_S", 0.02)
    model = await world.model()
    world.workers.busy_s = 0.0
    await train_busily(world, model, 1, 2)
    await world.until(lambda: snapshot_of(world, model), lambda row: row is not None and row.seq_id == 6)
    world.workers.failing["load"] = StorageAwayError("rank 1 failed in write: no space left")
    world.workers.broken = DEAD
    world.driver.wake()
    await world.until(lambda: world.workers.names().count("load"), lambda times: times > 2)
    world.workers.failing.clear()
    await train(world, model, 7, 1)
    assert await steps_of(world, model) == expected(1, 3)


async def with_snapshot(world: World, spec: LoraSpec | None = None) -> tuple[ModelId, Path]:
    """A model that has run two steps, and the directory of its snapshot."""
    world.patch.setattr(trainer_driver, "IDLE_S", 0.02)
    model = await world.model(spec)
    world.workers.busy_s = 0.0
    await train_busily(world, model, 1, 2)
    row = await world.until(
        lambda: snapshot_of(world, model), lambda row: row is not None and row.seq_id == 6
    )
    world.patch.setattr(trainer_driver, "IDLE_S", 60.0)
    return model, Path(row.directory)


async def start(store: Store, base_model: str = "tiny") -> None:
    """Do what a start does before its engine runs."""
    sort = partial(parking.sort_models, fingerprints={base_model: base_model})
    await store.write(sort)


async def test_a_model_whose_snapshot_is_damaged_is_parked_until_it_is_mended(world: World) -> None:
    await start(world.store)
    model, snapshot = await with_snapshot(world)
    neighbour = await world.model()
    await train(world, neighbour, 1, 1)
    after = world.new_engine()
    after.workers.unreadable.add(str(snapshot))
    failed = await journal.submit_pass(world.store, model, 7)
    await after.done(failed)
    message = (await journal.error_of(world.store, failed)).message
    assert f"is parked: checkpoint …/{snapshot.name} is damaged; it is tried again" in message
    assert "it has no checkpoint" in message
    await train(after, neighbour, 4, 1)
    assert await steps_of(after, neighbour) == expected(1, 2)
    await start(world.store)
    mended = after.new_engine()
    await mended.done(await journal.submit_step(world.store, model, 8))  # of the window that failed
    await train(mended, model, 9, 1)
    assert await steps_of(mended, model) == [*expected(1, 2), [9, 10]]


async def test_what_ran_nothing_since_its_snapshot_comes_back_when_it_is_asked_for(world: World) -> None:
    """Also what died with the ranks; what had more to replay is there first, whatever it is asked."""
    (model, _), (other, _) = [await with_snapshot(world) for _ in range(2)]
    busy = await world.model()
    await train(world, busy, 1, 1)
    after = world.new_engine()
    await after.until(lambda: after.ready)
    keys = [await journal.key_of(world.store, each) for each in (busy, model, other)]
    assert after.workers.asked("create") == keys[:1]
    (recovery,) = after.driver.view().incidents
    assert recovery.text.startswith("1 model came back, with ")
    assert recovery.text.endswith("; 2 more will when they are asked for")
    assert after.reports[-1] == trainer_driver.ASLEEP
    await train(after, model, 7, 1)
    assert after.workers.asked("create") == keys[:2]
    assert await steps_of(after, model) == expected(1, 3)
    after.workers.broken = DEAD
    await train(after, other, 7, 1)
    assert after.workers.asked("create") == [*keys[:2], *sorted(keys[:2]), keys[2]]
    assert await steps_of(after, other) == expected(1, 3)
    assert await steps_of(after, model) == expected(1, 3)
    assert await steps_of(after, busy) == expected(1, 1)


@pytest.mark.parametrize("asked", [True, False], ids=["asked for", "in idle time"])
async def test_files_of_what_sleeps_are_fetched_while_others_train(world: World, asked: bool) -> None:
    """As after a take-over by another host, while the storage is away for a time."""
    model, snapshot = await with_snapshot(world)
    other = await world.model()
    await train(world, other, 1, 1)
    world.running.cancel()
    elsewhere = world.root.parent / "elsewhere"
    snapshot.rename(elsewhere)
    away, tried = True, list[str]()

    async def fetch(_: SnapshotKeeper, row: SnapshotRow) -> None:
        tried.append(row.directory)
        if away:
            raise StorageAwayError("cannot read s3://bucket/1: no route to host")
        if elsewhere.exists():
            elsewhere.rename(row.directory)

    world.patch.setattr(SnapshotKeeper, "fetch", fetch)
    world.patch.setattr(SnapshotKeeper, "stored", True)
    world.patch.setattr(outbox, "AWAY_S", 0.01)
    if not asked:
        world.patch.setattr(trainer_driver, "IDLE_S", 0.02)
    after = world.new_engine()
    waiting = await journal.submit_pass(world.store, model, 7) if asked else None
    await after.until(lambda: len(tried) > 2)
    await train(after, other, 4, 1)
    assert "load" not in after.workers.names()
    away = False
    if waiting is not None:
        await after.done(waiting)
    await after.until(lambda: "load" in after.workers.names())
    if waiting is None:
        waiting = await journal.submit_pass(world.store, model, 7)
    await all_done(after, waiting, await journal.submit_step(world.store, model, 8))
    assert await steps_of(after, model) == [*expected(1, 2), [7]]
    assert after.workers.names().count("load") == 1


async def test_models_come_back_while_there_is_nothing_else_to_do(world: World) -> None:
    (model, _), (gone, _), (damaged, snapshot) = [await with_snapshot(world) for _ in range(3)]
    world.patch.setattr(trainer_driver, "IDLE_S", 0.02)
    world.patch.setattr(trainer_driver, "IDLE_PACE_S", 0.02)
    after = world.new_engine()
    after.workers.unreadable.add(str(snapshot))
    after.driver.requests.release(await journal.key_of(world.store, gone))  # its session is over
    key = await journal.key_of(world.store, model)
    await after.until(lambda: key in after.workers.trained and after.workers.trained[key].steps)
    assert await steps_of(after, model) == expected(1, 2)
    await after.until(
        lambda: journal.model_of(world.store, damaged), lambda found: found.state is ModelState.PARKED
    )
    await after.until(
        lambda: journal.model_of(world.store, gone), lambda found: found.state is ModelState.RELEASED
    )
    await after.until(lambda: after.reports[-1] == "")
    assert after.reports.count("") == 1
    assert after.workers.restarts == 0
    await after.until(lambda: sizes(after.driver)["ModelReturns._asleep"] == 0)


async def test_models_that_are_to_be_saved_come_back_several_at_once(world: World) -> None:
    """Each save is a unit of its own. One of the models cannot come back, which is known only then."""
    *fine, damaged = [await with_snapshot(world) for _ in range(4)]
    world.running.cancel()
    body = SaveWeightsBody("a").to_bytes()
    *saves, failed = [
        await journal.submit(world.store, model, 7, RequestKind.SAVE_WEIGHTS, body)
        for model, _ in (*fine, damaged)
    ]
    after = world.new_engine()
    after.workers.unreadable.add(str(damaged[1]))
    load, loading, all_load = after.workers.load_state, list[ModelKey](), asyncio.Event()

    async def together(model: ModelKey, directory: str, *, optimizer: bool) -> None:
        loading.append(model)
        if len(loading) == 4:
            all_load.set()
        await all_load.wait()
        await load(model, directory, optimizer=optimizer)

    world.patch.setattr(after.workers, "load_state", together)
    await all_done(after, *saves)
    await after.done(failed)
    assert "is damaged; it is tried again" in (await journal.error_of(world.store, failed)).message
    assert len(loading) == 4
    assert after.workers.restarts == 0


@pytest.mark.parametrize(("asleep", "before"), [(True, [0, 0, 2, 3]), (False, [0, 0, 2, 3, 3])])
async def test_samplers_on_the_same_devices_may_have_them_before_all_models_are_back(
    world: World, asleep: bool, before: list[int]
) -> None:
    """Of a unit, or those that must be back before any unit, whose work since then is replayed after that."""
    models = [(await with_snapshot(world))[0] for _ in range(3)]
    if not asleep:
        await all_done(world, *[await journal.submit_pass(world.store, model, 7) for model in models])
    world.running.cancel()
    passes = [await journal.submit_pass(world.store, model, 8 - asleep) for model in models]
    loaded: list[int] = []  # before each context of the trainer

    def training(_: Placement) -> AbstractAsyncContextManager[None]:
        loaded.append(len(after.workers.asked("load")))
        return nullcontext()

    world.patch.setattr(model_returns, "AT_ONCE", 2)
    world.patch.setattr(Placement, "training", training)
    after = world.new_engine()
    await all_done(after, *passes)
    assert loaded[: len(before)] == before


async def test_a_unit_runs_without_the_model_that_cannot_come_back(world: World) -> None:
    """Both asked before the engine was there, so that their passes are one unit."""
    (model, snapshot), (other, _) = [await with_snapshot(world) for _ in range(2)]
    world.running.cancel()
    failed = await journal.submit_pass(world.store, model, 7)
    fine = [
        await journal.submit_pass(world.store, other, 7),
        await journal.submit_step(world.store, other, 8),
    ]
    after = world.new_engine()
    after.workers.unreadable.add(str(snapshot))
    await all_done(after, *fine)
    await after.done(failed)
    assert "is damaged; it is tried again" in (await journal.error_of(world.store, failed)).message
    assert await steps_of(after, other) == [*expected(1, 2), [7]]
    assert after.workers.restarts == 0


async def test_ranks_that_die_as_a_model_comes_back_cost_nothing(world: World) -> None:
    model, _ = await with_snapshot(world)
    after = world.new_engine()
    await after.until(lambda: after.ready)
    restart = after.workers.restart

    async def heal() -> None:
        await restart()
        after.workers.failing.clear()

    world.patch.setattr(after.workers, "restart", heal)
    after.workers.failing["load"] = DEAD
    passes = [await journal.submit_pass(world.store, model, 7 + number) for number in range(2)]
    await all_done(after, *passes, await journal.submit_step(world.store, model, 9))
    assert after.workers.restarts == 1
    assert await steps_of(after, model) == expected(1, 3)


async def test_deaths_of_the_ranks_are_forgotten_once_a_model_is_back(world: World) -> None:
    """Every second time that the model comes back, they die."""
    model, _ = await with_snapshot(world)
    world.patch.setattr(trainer_driver, "IDLE_S", 0.01)
    after = world.new_engine()
    load, directories = after.workers.load_state, list[str]()

    async def every_second(model: ModelKey, directory: str, *, optimizer: bool) -> None:
        directories.append(directory)
        if len(directories) % 2 == 0:
            raise after.workers._break("rank 0 died in load_state")
        await load(model, directory, optimizer=optimizer)

    world.patch.setattr(after.workers, "load_state", every_second)
    for died in range(model_returns.WAKES + 1):
        await after.until(lambda: len(directories) == 2 * died + 1)  # noqa: B023
        after.workers.broken = DEAD
        after.driver.wake()
    await train(after, model, 7, 1)
    assert await steps_of(after, model) == expected(1, 3)


async def test_who_shared_a_unit_with_a_deadly_request_is_there_when_it_runs_alone(world: World) -> None:
    """Both slept; the ranks die of the unit, and then of the first request alone."""
    models = [(await with_snapshot(world))[0] for _ in range(2)]
    world.running.cancel()
    passes = [await journal.submit_pass(world.store, model, 7) for model in models]
    steps = [await journal.submit_step(world.store, model, 8) for model in models]
    after = world.new_engine()
    after.workers.deadly.add(await journal.key_of(world.store, models[0]))
    await after.done(passes[0])
    assert (
        "rank 0 died in run_pass, also when it was run alone"
        in (await journal.error_of(world.store, passes[0])).message
    )
    await all_done(after, passes[1], steps[1])
    assert await steps_of(after, models[1]) == [*expected(1, 2), [7]]


@pytest.mark.parametrize("together", [False, True], ids=["alone", "with others"])
async def test_a_model_whose_return_kills_the_ranks_is_parked_alone(world: World, together: bool) -> None:
    """Asked for alone or with others, which then come back one by one, on ranks that work."""
    deadly, *others = [(await with_snapshot(world))[0] for _ in range(4)]
    world.running.cancel()
    asked = others if together else []
    lost, *fine = [await journal.submit_pass(world.store, model, 7) for model in (deadly, *asked)]
    after = world.new_engine()
    load, key, worked = after.workers.load_state, await journal.key_of(world.store, deadly), list[str]()
    loading, beside, all_load = set[ModelKey](), list[int](), asyncio.Event()

    async def deadly_load(model: ModelKey, directory: str, *, optimizer: bool) -> None:
        loading.add(model)
        if len(loading) == 1 + len(asked):
            all_load.set()
        await all_load.wait()
        try:
            if model == key:
                beside.append(len(loading) - 1)
                for _ in range(20):  # in which who comes back beside it gets here
                    await asyncio.sleep(0)
                    beside[-1] = max(beside[-1], len(loading) - 1)
                raise after.workers._break("rank 0 died in load_state")
            await asyncio.sleep(0)  # the deadly one counts first
            await load(model, directory, optimizer=optimizer)
        finally:
            loading.remove(model)

    world.patch.setattr(after.workers, "load_state", deadly_load)

    def note_work() -> None:
        if 0 < after.workers.restarts < model_returns.WAKES:
            worked.append(after.workers.names()[-1])

    world.patch.setattr(after.workers, "note_work", note_work)
    await after.done(lost)
    assert "die each time that it is brought back" in (await journal.error_of(world.store, lost)).message
    assert after.workers.restarts == model_returns.WAKES
    assert worked == ["pass"], "before it came back alone"
    assert beside == [len(asked), 0]
    fine += [await journal.submit_pass(world.store, each, 7) for each in others if not asked]
    steps = [await journal.submit_step(world.store, each, 8) for each in others]
    await all_done(after, *fine, *steps)
    assert [await steps_of(after, each) for each in others] == [[*expected(1, 2), [7]]] * len(others)
    assert after.workers.restarts == model_returns.WAKES


async def test_ranks_that_died_before_a_model_began_to_come_back_park_it_in_no_case(world: World) -> None:
    model, _ = await with_snapshot(world)
    after = world.new_engine()
    await after.until(lambda: after.ready)
    look, deaths = model_returns.History.may_be_here, [DEAD] * model_returns.WAKES

    def die(history: model_returns.History) -> bool:
        if deaths:
            after.workers.broken = deaths.pop()
        return look(history)

    world.patch.setattr(model_returns.History, "may_be_here", die)
    await train(after, model, 7, 1)
    assert await steps_of(after, model) == expected(1, 3)
    assert after.workers.restarts == model_returns.WAKES


async def test_idle_time_leaves_a_model_alone_that_waits_for_its_disk(world: World) -> None:
    model, _ = await with_snapshot(world)
    other, _ = await with_snapshot(world)
    world.patch.setattr(trainer_driver, "IDLE_S", 0.01)
    world.patch.setattr(unit_execution, "AWAY_S", 3600.0)
    after = world.new_engine()
    after.workers.failing["load"] = UNREADABLE
    await after.until(lambda: after.workers.names().count("load") == 2)
    await asyncio.gather(*(after.until(lambda: after.driver.wake() or True) for _ in range(20)))
    after.workers.failing.clear()
    assert after.workers.names().count("load") == 2
    assert {(await journal.model_of(world.store, each)).state for each in (model, other)} == {
        ModelState.READY
    }


async def test_a_snapshot_at_which_the_disk_cannot_even_look_is_tried_with_patience(world: World) -> None:
    model, snapshot = await with_snapshot(world)
    exists = Path.exists

    def fails(path: Path) -> bool:
        if path == snapshot:
            raise OSError(errno.EIO, "Input/output error")
        return exists(path)

    world.patch.setattr(Path, "exists", fails)
    await goes_on(world, model)


async def test_a_snapshot_stays_whose_root_has_another_name_now(world: World) -> None:
    model, snapshot = await with_snapshot(world)
    root = snapshot.parents[1]
    root.rename(root.with_name("disk"))
    root.symlink_to(root.with_name("disk"))
    key = await journal.key_of(world.store, model)
    row = snapshot_records.SnapshotRow(6, str(root.with_name("disk") / str(key) / snapshot.name), True)
    await world.store.write(lambda conn: snapshot_records.put(conn, key, row))
    await goes_on(world, model)
    assert snapshot.is_dir()


@pytest.fixture
def soon_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (replay, model_returns, unit_execution):
        monkeypatch.setattr(module, "AWAY_S", 0.01)


WHEN = pytest.mark.parametrize("more", [0, 1], ids=["asleep", "with more to replay"])


@pytest.mark.parametrize("error", [UNREADABLE, ExhaustedError("no memory")], ids=["disk", "memory"])
@WHEN
async def test_a_disk_or_memory_that_fails_for_some_seconds_delays_a_model(
    world: World, soon_again: None, more: int, error: Exception
) -> None:
    """One that sleeps delays no other."""
    model, _ = await with_snapshot(world)
    following = await train(world, model, 7, more)
    after = world.new_engine()
    load_in_the_end = failing_first(after.workers.load_state, [error] * 2)
    world.patch.setattr(after.workers, "load_state", load_in_the_end)
    asked = await journal.submit_pass(world.store, model, following)
    await train(after, await after.model(), 1, 1)
    await all_done(after, asked, await journal.submit_step(world.store, model, following + 1))
    assert await steps_of(after, model) == [*expected(1, 2 + more), [following]]


NO_MEMORY = ExhaustedError(f"a trainer rank ran out of memory: {SEND_AGAIN}start the server with more ranks")


@pytest.mark.parametrize(
    "lasts", [model_returns.TRIES - 1, model_returns.TRIES], ids=["soon over", "lasting"]
)
@pytest.mark.parametrize("what", ["create", "pass", "step"])
async def test_a_replay_waits_for_memory_for_a_while(
    world: World, soon_again: None, what: str, lasts: int
) -> None:
    """Then the model is parked, and is not told to send the request again."""
    model = await world.model()
    await all_done(world, await journal.submit_pass(world.store, model, 1))
    await all_done(world, await journal.submit_step(world.store, model, 2))
    key = await journal.key_of(world.store, model)
    after = world.new_engine()
    failed = iter(range(lasts + (what == "pass")))  # which is tried in smaller rows before it waits
    tell, workers = after.workers._tell, after.workers

    async def short_of_memory(called: str, value: object) -> None:
        workers.short, workers.large = set(), set()
        if called == what and next(failed, None) is not None:
            if what == "create":
                raise NO_MEMORY
            (workers.short if what == "step" else workers.large).add(key)
        await tell(called, value)

    world.patch.setattr(workers, "_tell", short_of_memory)
    step = await journal.submit_step(world.store, model, 3)
    if lasts < model_returns.TRIES:
        await all_done(after, step)
        assert await steps_of(after, model) == [[1], []]
    else:
        await after.done(step)
        why = (await journal.error_of(world.store, step)).message
        assert "memory" in why
        assert "is parked" in why
        assert SEND_AGAIN not in why


@pytest.mark.parametrize("what", ["create", "pass"])
async def test_a_shortage_that_lasts_is_waited_for_once_and_not_for_each_model(
    world: World, caplog: pytest.LogCaptureFixture, soon_again: None, what: str
) -> None:
    """Until there is memory again, as the last model finds."""
    models = [await world.model() for _ in range(4)]
    for model in models:
        await train(world, model, 1, 1)
    *short, fine = [await journal.key_of(world.store, model) for model in models]
    after = world.new_engine()
    tell = after.workers._tell

    async def short_of_memory(called: str, value: object) -> None:
        await tell(called, value)
        if called == what and value in short:
            raise NO_MEMORY

    world.patch.setattr(after.workers, "_tell", short_of_memory)
    after.workers.large = set(short) if what == "pass" else set()
    await after.until(lambda: after.ready)
    assert caplog.text.count("tried again in") == model_returns.TRIES - 1
    await after.until(lambda: list(after.workers.trained) == [fine])


async def test_a_snapshot_that_is_damaged_costs_no_other_model_its_tries_for_memory(
    world: World, soon_again: None
) -> None:
    damaged, _ = await with_snapshot(world)
    await train(world, damaged, 7, 1)
    model = await world.model()
    await train(world, model, 1, 1)
    key, errors = await journal.key_of(world.store, model), [NO_MEMORY] * 2
    after = world.new_engine()
    after.workers.failing["load"] = UNREADABLE
    tell = after.workers._tell

    async def short_of_memory(called: str, value: object) -> None:
        await tell(called, value)
        if called == "create" and value == key and errors:
            raise errors.pop()

    world.patch.setattr(after.workers, "_tell", short_of_memory)
    await train(after, model, 4, 1)
    assert after.workers.names().count("load") == model_returns.TRIES


@WHEN
async def test_a_model_on_a_disk_that_fails_for_longer_is_parked_with_its_files(
    world: World, soon_again: None, more: int
) -> None:
    await start(world.store)
    model, snapshot = await with_snapshot(world)
    following = await train(world, model, 7, more)
    after = world.new_engine()
    after.workers.failing["load"] = UNREADABLE
    lost = await journal.submit_pass(world.store, model, following)
    await after.until(lambda: journal.model_of(world.store, model), _is_parked)
    assert (
        "cannot be read: Input/output error; it is tried"
        in (await journal.error_of(world.store, lost)).message
    )
    assert after.workers.names().count("load") == model_returns.TRIES
    assert snapshot.is_dir()
    await start(world.store)
    mended = after.new_engine()
    await mended.done(await journal.submit_step(world.store, model, following + 1))  # of what failed
    await train(mended, model, following + 2, 1)
    assert (await steps_of(mended, model))[:-1] == expected(1, 2 + more)


async def test_a_model_that_is_parked_after_a_death_takes_no_part_when_the_unit_runs_again(
    world: World,
) -> None:
    await start(world.store)
    model, snapshot = await with_snapshot(world)
    neighbour = await world.model()
    for each, seq_id in ((model, 7), (neighbour, 1)):
        await all_done(world, await journal.submit_pass(world.store, each, seq_id))
    restart = world.workers.restart

    async def heal() -> None:
        await restart()
        world.workers.failing.clear()

    world.patch.setattr(world.workers, "restart", heal)
    world.workers.unreadable.add(str(snapshot))
    world.workers.failing["step"] = DEAD
    steps = [await journal.submit_step(world.store, *each) for each in ((model, 8), (neighbour, 2))]
    for step in steps:
        await world.done(step)
    assert "is parked" in (await journal.error_of(world.store, steps[0])).message
    await train(world, neighbour, 3, 1)
    assert await steps_of(world, neighbour) == [[1], [3, 4]]


async def test_a_copy_beside_snapshots_is_left_alone(world: World) -> None:
    model, snapshot = await with_snapshot(world)
    copy = snapshot.parent.with_name(f"{snapshot.parent.name}.bak") / snapshot.name
    shutil.copytree(snapshot, copy)
    await goes_on(world, model)
    assert copy.is_dir()


def _is_parked(row: ModelRow) -> bool:
    return row.state is ModelState.PARKED


async def test_a_model_trains_on_as_if_no_other_base_model_had_been_served(world: World) -> None:
    """A request of meanwhile fails in its place, as any other may."""
    await start(world.store)
    model, _ = await with_snapshot(world)
    await train(world, model, 7, 1)
    await start(world.store, "other")
    other = world.new_engine()
    stranger = await other.model()
    await train(other, stranger, 1, 1)
    failed = await journal.submit_pass(world.store, model, 10, forward_only=True)
    await other.done(failed)
    failure = await journal.error_of(world.store, failed)
    assert "was trained on base model tiny, and this server trains other" in failure.message
    await start(world.store)
    after = other.new_engine()
    await train(after, model, 11, 1)
    assert await steps_of(after, model) == [*expected(1, 3), [11, 12]]
    assert "was trained on" in ((await journal.model_of(world.store, stranger)).state_reason or "")


@pytest.mark.parametrize("how", ["its session is over", "its client asks"])
async def test_a_parked_model_can_be_released(world: World, how: str) -> None:
    await start(world.store)
    model, snapshot = await with_snapshot(world)
    await start(world.store, "other")
    other = world.new_engine()
    if how == "its session is over":
        other.driver.requests.release(await journal.key_of(world.store, model))
    else:
        await all_done(
            other, await world.store.write(lambda conn: cancellation.submit_unload(conn, None, model))
        )
    await other.until(lambda: journal.model_of(world.store, model), lambda row: row.state == "released")
    await other.until(lambda: not snapshot.exists())
    await start(world.store)
    assert (await journal.model_of(world.store, model)).state is ModelState.RELEASED


@pytest.mark.parametrize(
    ("dtype", "drift", "differs"),
    [("float32", 1e-5, False), ("float32", 1e-3, True), ("bfloat16", 0.02, False), ("bfloat16", 0.1, True)],
)
async def test_a_replay_with_other_logprobs_says_so_in_the_next_step(
    world: World, dtype: str, drift: float, differs: bool
) -> None:
    """Bfloat16 alone moves them by more than float32 may."""
    model = await world.model()
    await train(world, model, 1, 1)
    after = world.new_engine()
    after.workers.drift = drift
    after.workers.spec.dtype = dtype
    done = await after.done(await journal.submit_step(world.store, model, 4))
    assert orjson.loads(done.body or b"")["metrics"].get("replay_differed") == (1.0 if differs else None)
    done = await after.done(await journal.submit_step(world.store, model, 5))
    assert "replay_differed" not in orjson.loads(done.body or b"")["metrics"]


async def test_a_replayed_request_that_kills_the_ranks_costs_its_own_model_only(world: World) -> None:
    """Both ran in one unit; the neighbour is replayed without it."""
    model, deadly = await world.model(), await world.model()
    async with behind_a_pass(world, model):
        together = [await journal.submit_pass(world.store, *each) for each in ((model, 2), (deadly, 1))]
    await all_done(world, *together)
    after = world.new_engine()
    after.workers.deadly = {await journal.key_of(world.store, deadly)}
    await all_done(after, await journal.submit_step(world.store, model, 3))
    assert await steps_of(after, model) == [[1, 2]]
    assert after.workers.restarts == 1 + replay.ATTEMPTS  # first together with what else is replayed
    parked = await journal.model_of(world.store, deadly)
    assert parked.state is ModelState.PARKED
    assert "request 1 kills the trainer's processes each time it is replayed" in (parked.state_reason or "")


async def test_a_replayed_unit_for_which_there_is_no_memory_costs_the_large_request_only(
    world: World, soon_again: None
) -> None:
    """Both fitted when they ran, in one unit."""
    model, large = await world.model(), await world.model()
    async with behind_a_pass(world, model):
        together = [await journal.submit_pass(world.store, *each) for each in ((model, 2), (large, 1))]
    await all_done(world, *together)
    after = world.new_engine()
    after.workers.large = {await journal.key_of(world.store, large)}
    await all_done(after, await journal.submit_step(world.store, model, 3))
    assert await steps_of(after, model) == [[1, 2]]
    assert (await journal.model_of(world.store, large)).state is ModelState.PARKED


async def test_a_pass_prepared_beside_one_that_dies_with_the_ranks_is_not_forgotten(
    make_world: MakeWorld,
) -> None:
    world = make_world(unit_tokens=1)
    models = [await world.model() for _ in range(3)]
    world.workers.go_on.clear()
    passes = [await journal.submit_pass(world.store, models[0], 1)]
    await world.until(lambda: world.workers.names().count("pass"))
    passes += [
        await journal.submit_pass(world.store, model, seq)
        for model, seq in zip(models, (2, 1, 1), strict=True)
    ]
    await world.taken_in()
    world.workers.go_on.set()
    world.workers.go_on.clear()  # the next one waits again, and one more is prepared meanwhile
    await world.until(lambda: world.workers.names().count("pass"), lambda ran: ran == 2)
    world.workers.broken = DEAD
    world.workers.go_on.set()
    await all_done(world, *passes)
