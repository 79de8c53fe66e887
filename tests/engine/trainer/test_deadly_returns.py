"""Models in whose return the ranks die each time: they are parked, and no other; unsound ranks are lost."""

import asyncio
from collections.abc import Callable

import pytest

from skyrl_tinker.domain.ids import ModelKey, ModelState
from skyrl_tinker.domain.values import LoraSpec
from skyrl_tinker.engine.recovery.snapshot_keeper import SnapshotKeeper
from skyrl_tinker.engine.trainer.model_returns import DIE_EACH_TIME, WAKES
from skyrl_tinker.errors import TrainerError
from skyrl_tinker.store.replay.snapshot_records import SnapshotRow
from skyrl_tinker.training.restart_policy import QUICK_S, RestartPolicy
from tests.engine.support import journal
from tests.engine.support.world import World
from tests.engine.trainer.test_replay import expected, steps_of, train, with_snapshot

DEAD = TrainerError("rank 0 died")
FULL = LoraSpec(0, 1)


def have_policy(world: World, lived_s: float = 0.0) -> None:
    """Count the deaths of the ranks as real ones do. `lived_s`: how long they live each time."""
    now = 0.0
    policy, restart = RestartPolicy(lambda: now), world.workers.restart

    async def restart_within_policy() -> None:
        nonlocal now
        assert world.workers.broken is not None
        now += lived_s
        policy.died(world.workers.broken)
        await restart()
        policy.born()

    policy.born()
    world.patch.setattr(world.workers, "restart", restart_within_policy)
    world.patch.setattr(world.workers, "note_work", policy.worked)


def have_deadly_loads(world: World, is_deadly: Callable[[ModelKey], bool]) -> None:
    """Have the ranks die at the load of a snapshot, while others load, too."""
    load = world.workers.load_state

    async def deadly_load(model: ModelKey, directory: str, *, optimizer: bool) -> None:
        await asyncio.sleep(0)  # others begin
        if is_deadly(model):
            raise world.workers._break("rank 0 died in load_state")
        await asyncio.sleep(0)
        await load(model, directory, optimizer=optimizer)

    world.patch.setattr(world.workers, "load_state", deadly_load)


@pytest.mark.parametrize("lived_s", [0.0, QUICK_S + 1], ids=["at once", "after a minute"])
@pytest.mark.parametrize("spec", [None, FULL], ids=["with more to replay", "of full parameters"])
async def test_models_whose_returns_kill_the_ranks_are_parked_though_they_cannot_sleep(
    world: World, lived_s: float, spec: LoraSpec | None
) -> None:
    """After a death of the ranks for another reason; two of the models do, and come back among others."""
    models = [(await with_snapshot(world, spec))[0] for _ in range(4)]
    more = int(spec is None)
    for model in models:
        await train(world, model, 7, more)
    deadly, fine = models[::2], models[1::2]
    keys = {await journal.key_of(world.store, each) for each in deadly}
    after = world.new_engine()
    have_policy(after, lived_s)
    have_deadly_loads(after, keys.__contains__)
    after.workers.broken = DEAD
    for model in fine:
        await train(after, model, 7 + 3 * more, 1)
        assert await steps_of(after, model) == expected(1, 3 + more)
    for model in deadly:
        row = await journal.model_of(world.store, model)
        assert row.state is ModelState.PARKED
        assert DIE_EACH_TIME in (row.state_reason or "")
    assert after.workers.restarts == 1 + 1 + len(deadly), "together, then each of them alone"


@pytest.mark.parametrize("more", [0, 1], ids=["asleep", "with more to replay"])
async def test_ranks_that_die_of_anything_are_lost_and_park_no_model(world: World, more: int) -> None:
    model, _ = await with_snapshot(world)
    await train(world, model, 7, more)
    after = world.new_engine()
    lost, mended = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        lost.set()
        await mended.wait()
        after.workers.broken = None
        after.workers.trained.clear()

    after.lost = wait
    have_policy(after)
    have_deadly_loads(after, lambda _: not mended.is_set())
    after.workers.failing["pass"] = DEAD
    asked = await journal.submit_pass(world.store, model, 7 + 3 * more)
    await after.until(lost.is_set)
    assert (await journal.model_of(world.store, model)).state is ModelState.READY
    after.workers.failing.clear()
    mended.set()
    await after.done(asked)
    await after.done(await journal.submit_step(world.store, model, 8 + 3 * more))
    assert await steps_of(after, model) == [*expected(1, 2 + more), [7 + 3 * more]]


@pytest.mark.parametrize("more", [0, 1], ids=["asleep", "with more to replay"])
async def test_ranks_that_died_while_a_snapshot_was_fetched_park_its_model_in_no_case(
    world: World, more: int
) -> None:
    """The model was not on them."""
    model, _ = await with_snapshot(world)
    await train(world, model, 7, more)
    after = world.new_engine()
    fetch, deaths = SnapshotKeeper.fetch, [DEAD] * WAKES

    async def slow_fetch(keeper: SnapshotKeeper, row: SnapshotRow) -> None:
        await fetch(keeper, row)
        if deaths:
            after.workers.broken = deaths.pop()

    world.patch.setattr(SnapshotKeeper, "fetch", slow_fetch)
    await train(after, model, 7 + 3 * more, 1)
    assert await steps_of(after, model) == expected(1, 3 + more)
    assert after.workers.restarts == WAKES
