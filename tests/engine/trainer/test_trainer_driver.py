"""Order, windows and failures, on the real store. Workers are scripted: what they compute does not matter."""

import asyncio
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from sqlalchemy import select
from sqlalchemy.exc import OperationalError

from skyrl_tinker.domain.ids import FutureStatus, RequestKind
from skyrl_tinker.domain.values import AdamParams, Failure
from skyrl_tinker.engine.colocation.placement import SEPARATE
from skyrl_tinker.engine.recovery import snapshot_keeper
from skyrl_tinker.engine.trainer import trainer_driver
from skyrl_tinker.errors import ExhaustedError
from skyrl_tinker.protocol.stored_requests import OptimStepBody, SaveWeightsBody
from skyrl_tinker.store import model_records
from skyrl_tinker.store.database.tables import Future, Request
from skyrl_tinker.store.futures import cancellation, queue
from skyrl_tinker.store.replay import snapshot_records, unit_records
from skyrl_tinker.store.store import Store
from skyrl_tinker.training.trainer_group import PassResult
from tests.engine.support import journal
from tests.engine.support.world import MakeWorld, World
from tests.support.failures import failing_first
from tests.support.reads import reading


async def test_requests_arriving_3_2_1_run_as_1_2_3(world: World) -> None:
    model = await world.model()
    third = await journal.submit_pass(world.store, model, 3, forward_only=True)
    second = await journal.submit_step(world.store, model, 2)
    first = await journal.submit_pass(world.store, model, 1)
    for accepted in (first, second, third):
        assert (await world.done(accepted)).status is FutureStatus.DONE
    assert world.workers.names() == ["create", "pass", "step", "pass"]
    assert [item for what, item in world.workers.told if what == "pass"][1][0][1] is False


async def test_bodies_of_the_newest_forwards_stay_to_be_read_also_without_snapshots(world: World) -> None:
    world.patch.setattr(unit_records, "KEPT", 2)
    model = await world.model()
    for seq_id in range(1, 10):
        await world.done(await journal.submit_pass(world.store, model, seq_id, forward_only=True))
    of_model = Future.model_key == await journal.key_of(world.store, model)
    query = select(Future.seq_id).join(Request, Request.future_id == Future.id).where(of_model)

    def stored() -> list[int | None]:
        with reading(world.store) as conn:
            return list(conn.scalars(query.order_by(Future.seq_id)))

    assert await world.until(stored, lambda left: len(left) <= 2) == [8, 9]


async def test_what_two_models_have_ready_runs_in_one_unit(world: World) -> None:
    models = [await world.model() for _ in range(2)]
    world.workers.go_on.clear()
    blocker = await journal.submit_pass(world.store, models[0], 1)
    await world.until(world.workers.names, lambda names: "pass" in names)
    accepted = [await journal.submit_pass(world.store, model, 2 - i) for i, model in enumerate(models)]
    steps = [await journal.submit_step(world.store, model, 3 - i) for i, model in enumerate(models)]
    await world.taken_in()
    world.workers.go_on.set()
    for each in (blocker, *accepted, *steps):
        await world.done(each)
    passes = [value for what, value in world.workers.told if what == "pass"]
    assert [len(value) for value in passes] == [1, 2]
    assert [len(value) for what, value in world.workers.told if what == "step"] == [2]


async def test_a_failed_backward_fails_its_own_step_only_and_clears_the_window(world: World) -> None:
    model, neighbour = await world.model(), await world.model()
    world.workers.bad_models.add(await journal.key_of(world.store, model))
    await world.done(await journal.submit_pass(world.store, model, 1))
    step = await journal.submit_step(world.store, model, 2)
    fine = await journal.submit_step(world.store, neighbour, 1)
    await world.done(step)
    failure = await journal.error_of(world.store, step)
    assert failure.category == "user"
    assert "forward_backward with seq_id 1 failed: loss is not finite" in failure.message
    assert (await world.done(fine)).status is FutureStatus.DONE
    assert ("zero", (await journal.key_of(world.store, model),)) in world.workers.told
    world.workers.bad_models.clear()
    await world.done(await journal.submit_pass(world.store, model, 3))
    assert (await world.done(await journal.submit_step(world.store, model, 4))).status is FutureStatus.DONE


async def test_a_refused_backward_is_named_with_its_reason_in_the_step(world: World) -> None:
    model = await world.model()
    why = Failure("datum 2: weights has length 3, expected 4", "user")
    await journal.submit(world.store, model, 1, RequestKind.FORWARD_BACKWARD, failure=why)
    step = await journal.submit_step(world.store, model, 2)
    await world.done(step)
    assert why.message in (await journal.error_of(world.store, step)).message


async def test_a_look_at_the_queues_while_a_step_runs_hides_no_refusal(world: World) -> None:
    model = await world.model()
    key = await journal.key_of(world.store, model)
    world.workers.go_on.clear()
    step = await journal.submit_step(world.store, model, 1)
    await world.until(world.workers.names, lambda names: "step" in names)
    why = Failure("datum 2: weights has length 3, expected 4", "user")
    await journal.submit(world.store, model, 2, RequestKind.FORWARD_BACKWARD, failure=why)
    await world.until(world.driver.requests.lanes.statuses, lambda lanes: key in lanes)
    world.driver.view()
    world.workers.go_on.set()
    assert (await world.done(step)).status is FutureStatus.DONE
    after = await journal.submit_step(world.store, model, 3)
    await world.done(after)
    assert why.message in (await journal.error_of(world.store, after)).message


async def test_a_flood_of_full_passes_does_not_keep_what_is_to_go(
    store: Store, make_world: MakeWorld
) -> None:
    world = make_world(unit_tokens=1)
    flooding, over, unloaded = [await world.model() for _ in range(3)]
    world.workers.go_on.clear()
    flood = [await journal.submit_pass(store, flooding, seq_id, forward_only=True) for seq_id in range(1, 9)]
    await world.until(world.workers.names, lambda names: "pass" in names)
    unload = await store.write(lambda conn: cancellation.submit_unload(conn, None, unloaded))
    await world.taken_in()
    world.driver.requests.release(await journal.key_of(store, over))
    world.workers.go_on.set()
    for each in (*flood, unload):
        await world.done(each)
    names = world.workers.names()
    assert names.count("pass") == len(flood)
    last = max(index for index, name in enumerate(names) if name == "release")
    assert names.count("release") == 2
    assert names[last:].count("pass") > len(flood) // 2


async def test_a_refused_step_clears_its_window(world: World) -> None:
    model = await world.model()
    await journal.submit_pass(world.store, model, 1)
    await journal.submit(world.store, model, 2, RequestKind.OPTIM_STEP, failure=Failure("lr", "user"))
    after = await journal.submit_step(world.store, model, 3)
    assert (await world.done(after)).status is FutureStatus.DONE
    assert world.workers.names() == ["create", "pass", "zero", "step"]


async def test_a_failed_forward_only_pass_leaves_the_step_alone(world: World) -> None:
    model = await world.model()
    world.workers.bad_models.add(await journal.key_of(world.store, model))
    await world.done(await journal.submit_pass(world.store, model, 1, forward_only=True))
    assert (await world.done(await journal.submit_step(world.store, model, 2))).status is FutureStatus.DONE


async def test_step_metrics_are_finite_json(world: World) -> None:
    model = await world.model()
    done = await world.done(await journal.submit_step(world.store, model, 1))
    assert orjson.loads(done.body or b"") == {"metrics": {"grad_norm": 1.0}, "type": "optim_step"}


async def test_a_database_that_fails_for_a_moment_loses_no_request(world: World) -> None:
    failures = [OperationalError("SELECT", None, OSError("disk I/O error"))]
    world.patch.setattr(model_records, "by_key", failing_first(model_records.by_key, failures))
    model = await world.model()
    assert failures == []
    assert (await world.done(await journal.submit_step(world.store, model, 1))).status is FutureStatus.DONE
    assert world.workers.names() == ["create", "step"]


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (RequestKind.OPTIM_STEP, OptimStepBody(AdamParams()).to_bytes()),
        (RequestKind.SAVE_WEIGHTS, SaveWeightsBody("0001").to_bytes()),
    ],
)
async def test_a_read_that_fails_delays_a_barrier_and_ends_nothing(
    world: World, kind: RequestKind, body: bytes
) -> None:
    model = await world.model()
    failures = [OperationalError("SELECT", None, OSError("disk I/O error"))]
    world.patch.setattr(queue, "read_bodies", failing_first(queue.read_bodies, failures))
    accepted = await journal.submit(world.store, model, 1, kind, body)
    assert (await world.done(accepted)).status is FutureStatus.DONE
    assert failures == []


async def test_others_run_between_the_tries_of_a_pass_for_which_there_is_no_memory(world: World) -> None:
    """It fails as soon as it was tried twice."""
    large, model = await world.model(), await world.model()
    keys = [await journal.key_of(world.store, each) for each in (large, model)]
    world.workers.large = {keys[0]}
    world.workers.go_on.clear()
    bad = await journal.submit_pass(world.store, large, 1)
    await world.until(world.workers.names, lambda names: "pass" in names)
    fine = await journal.submit_pass(world.store, model, 1)
    await world.taken_in()
    world.workers.go_on.set()
    assert (await world.done(fine)).status is FutureStatus.DONE
    await world.done(bad)
    assert (await journal.error_of(world.store, bad)).message == "no memory"
    passes = [items[0][0] for what, items in world.workers.told if what == "pass"]
    assert passes == [keys[0], keys[1], keys[0]]


async def test_a_step_for_which_there_is_no_memory_fails_alone_and_keeps_its_gradients(world: World) -> None:
    """The next step has them, and those that came since."""
    short, model = await world.model(), await world.model()
    world.workers.short = {await journal.key_of(world.store, short)}
    world.workers.go_on.clear()
    passes = [await journal.submit_pass(world.store, each, 1) for each in (short, model)]
    await world.until(world.workers.names, lambda names: "pass" in names)
    steps = [await journal.submit_step(world.store, each, 2) for each in (short, model)]
    await world.taken_in()
    world.workers.go_on.set()
    for each in (*passes, *steps):
        await world.done(each)
    assert await journal.error_of(world.store, steps[0]) == Failure("no memory", "server")
    assert len(world.workers.asked("step")[0]) == 2, "in one unit"
    assert world.workers.restarts == 0
    world.workers.short = set()
    await world.done(await journal.submit_pass(world.store, short, 3))
    again = await journal.submit_step(world.store, short, 4)
    assert (await world.done(again)).status is FutureStatus.DONE
    found = [world.workers.trained[await journal.key_of(world.store, each)].steps for each in (short, model)]
    assert found == [[[1, 3]], [[1]]]


async def test_a_model_given_up_while_there_was_no_memory_for_its_pass_is_told(world: World) -> None:
    model = await world.model()
    key = await journal.key_of(world.store, model)
    world.workers.large = {key}
    world.workers.go_on.clear()
    late = await journal.submit_pass(world.store, model, 1)
    await world.until(world.workers.names, lambda names: "pass" in names)
    await world.driver.requests.give_up({key: Failure("a request is missing", "user")})
    world.workers.go_on.set()
    await world.done(late)
    assert (await journal.error_of(world.store, late)).message == "a request is missing"
    assert world.workers.names().count("pass") == 1


async def test_work_ends_once_nothing_waits_and_no_snapshot_would_help(world: World) -> None:
    world.patch.setattr(trainer_driver, "IDLE_S", 0.01)
    ended, again, run_pass = asyncio.Event(), asyncio.Event(), world.workers.run_pass

    async def long_pass(*args: Any) -> PassResult:
        world.workers.busy_s += 1.0
        return await run_pass(*args)

    world.patch.setattr(world.workers, "run_pass", long_pass)
    tries, snapshots = 0, world.driver._snapshots
    take_largest = snapshots.take_largest

    async def take_at_last() -> None:
        nonlocal tries
        tries += not world.driver.requests.asked
        if tries > 2:
            await take_largest()

    world.patch.setattr(snapshots, "take_largest", take_at_last)

    async def pause() -> None:
        ended.set()
        await again.wait()

    world.lost = pause
    model = await world.model()
    step = await journal.submit_step(world.store, model, 2)
    await world.taken_in()
    world.may_end = True
    for _ in range(10):
        world.driver.wake()
        await asyncio.sleep(0)
    assert not ended.is_set(), "a request waits for an earlier one"
    with reading(world.store) as conn:
        key = await journal.key_of(world.store, model)
        assert snapshot_records.find(conn, key) is None
    passed = await journal.submit_pass(world.store, model, 1)
    for each in (passed, step):
        assert (await world.done(each)).status is FutureStatus.DONE
    await ended.wait()
    await world.driver.settle()
    snapshot = await world.store.read(lambda conn: snapshot_records.find(conn, key))
    assert snapshot is not None
    assert snapshot.seq_id == 2
    late = await journal.submit_pass(world.store, model, 3)
    await world.until(lambda: world.driver.requests.asked)
    world.may_end = False
    again.set()
    assert (await world.done(late)).status is FutureStatus.DONE


@pytest.mark.parametrize("fails", ["captures", "persist", None])
@pytest.mark.parametrize("trains", [True, False])
async def test_work_ends_once_a_snapshot_of_each_model_was_tried(
    world: World, fails: str | None, trains: bool
) -> None:
    """Where they fail, as on a full disk, models are replayed from their requests.

    Also where samplers have had the last turn on the GPUs.
    """
    turn = SimpleNamespace(trains=trains, training=SEPARATE.training)
    world.patch.setattr(world.driver, "_placement", turn)
    world.patch.setattr(trainer_driver, "IDLE_S", 0.01)
    world.patch.setattr(snapshot_keeper, "MODELS_AT_ONCE", 1)
    ended, run_pass = asyncio.Event(), world.workers.run_pass

    async def long_pass(*args: Any) -> PassResult:
        world.workers.busy_s += 1.0
        return await run_pass(*args)

    async def rest() -> None:
        ended.set()
        await asyncio.get_running_loop().create_future()

    world.patch.setattr(world.workers, "run_pass", long_pass)
    if fails:
        world.workers.failing[fails] = ExhaustedError("no room")
    models = [await world.model() for _ in range(2)]
    world.workers.go_on.clear()
    for model in models:
        await journal.submit_pass(world.store, model, 1)
        await journal.submit_step(world.store, model, 2)
    await world.taken_in()
    world.lost, world.may_end = rest, True
    world.workers.go_on.set()
    await world.until(ended.is_set)
    await world.driver.settle()
    tried = {key for keys in world.workers.asked("captures") for key in keys}
    assert tried == {await journal.key_of(world.store, model) for model in models}


async def test_a_model_that_is_unloaded_needs_no_ranks(world: World) -> None:
    world.patch.setattr(trainer_driver, "IDLE_S", 0.01)
    ended = asyncio.Event()

    async def rest() -> None:
        ended.set()
        await asyncio.get_running_loop().create_future()

    world.lost = rest
    model = await world.model()
    world.may_end = True
    world.driver.wake()
    await ended.wait()
    world.driver.woken.clear()
    unload = await world.store.write(lambda conn: cancellation.submit_unload(conn, None, model))
    await world.until(world.driver.woken.is_set)
    assert not world.driver.requests.asked
    await world.driver.retire()
    assert (await world.done(unload)).status is FutureStatus.DONE
