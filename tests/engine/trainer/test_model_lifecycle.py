"""Released, lost and never created models, and the requests that wait for them. Workers are scripted."""

import asyncio
import shutil
import threading
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError

from skyrl_tinker.domain.ids import FutureStatus, ModelKey, ModelState
from skyrl_tinker.domain.values import Failure
from skyrl_tinker.engine import outbox
from skyrl_tinker.engine.trainer import unit_execution
from skyrl_tinker.errors import TrainerError, UserError
from skyrl_tinker.store import model_records
from skyrl_tinker.store.futures import queue
from skyrl_tinker.store.model_records import ModelRow
from tests.engine.support import journal
from tests.engine.support.world import World
from tests.support.failures import failing_first
from tests.support.waiting import hold, holding


async def test_a_full_disk_under_the_database_delays_creations_and_releases(world: World) -> None:
    failures = [OperationalError("UPDATE", None, OSError("disk full"))] * 2
    world.patch.setattr(model_records, "set_state", failing_first(model_records.set_state, failures))
    world.patch.setattr(outbox, "RETRY_S", 0.01)
    model = await world.model()
    assert failures == []
    failures.append(OperationalError("UPDATE", None, OSError("disk full")))
    world.driver.requests.release(await journal.key_of(world.store, model))
    released = await world.until(lambda: journal.model_of(world.store, model), _is_released)
    assert released.state is ModelState.RELEASED
    assert world.workers.names() == ["create", "release"]


async def test_nobody_waits_for_the_files_of_models_that_are_released(world: World) -> None:
    gone, other = await world.model(), await world.model()
    go_on = threading.Event()
    removed = hold(world.patch, shutil, "rmtree", go_on)
    world.driver.requests.release(await journal.key_of(world.store, gone))
    async with holding(go_on):
        await world.until(lambda: removed)
        assert _is_released(await journal.model_of(world.store, gone))
        passed = await journal.submit_pass(world.store, other, 1)
        assert (await world.done(passed)).status is FutureStatus.DONE


async def test_a_model_ends_behind_what_it_ran(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a server that dies in between would refuse it after the end."""
    model, encode, encoded = await world.model(), unit_execution.encode, asyncio.Event()

    async def slowly(outputs: Any) -> Any:
        await encoded.wait()
        return await encode(outputs)

    monkeypatch.setattr(unit_execution, "encode", slowly)
    passed = await journal.submit_pass(world.store, model, 1)
    await world.until(world.workers.names, lambda names: "pass" in names)
    world.driver.requests.release(await journal.key_of(world.store, model))
    await world.until(world.workers.names, lambda names: "release" in names)
    late = await journal.submit_pass(world.store, model, 2)
    await world.done(late)
    assert not _is_released(await journal.model_of(world.store, model))
    encoded.set()
    assert (await world.done(passed)).status is FutureStatus.DONE
    await world.until(lambda: journal.model_of(world.store, model), _is_released)


async def test_ranks_that_die_right_behind_a_release_do_not_bring_the_model_back(world: World) -> None:
    gone, other = await world.model(), await world.model()
    key = await journal.key_of(world.store, gone)
    write, failures = model_records.set_state, [OperationalError("UPDATE", None, OSError("disk full"))]

    def set_state(
        conn: Connection, key: ModelKey, state: ModelState, reason: str | None = None, **was: Any
    ) -> bool:
        if failures:
            world.workers.broken = TrainerError("rank 0 died")
            world.driver.wake()
            raise failures.pop()
        return write(conn, key, state, reason, **was)

    world.patch.setattr(model_records, "set_state", set_state)
    world.patch.setattr(outbox, "RETRY_S", 0.01)
    world.driver.requests.release(key)
    await world.until(lambda: world.workers.restarts)
    passed = await journal.submit_pass(world.store, other, 1)
    assert (await world.done(passed)).status is FutureStatus.DONE
    assert key not in world.workers.trained


def _is_released(row: ModelRow) -> bool:
    return row.state is ModelState.RELEASED


async def test_models_that_cannot_come_back_are_parked_in_one_commit(world: World) -> None:
    """A lost disk has all of them: a thousand commits would hold everybody up for seconds."""
    models = [await world.model() for _ in range(3)]
    keys = [await journal.key_of(world.store, model) for model in models]
    waiting = [await journal.submit_pass(world.store, model, 2) for model in models]
    await world.taken_in()
    write, written = world.store.write, list[Any]()
    world.patch.setattr(world.store, "write", lambda *args: written.append(args) or write(*args))
    await world.driver._models.park({key: f"/srv/{key} is damaged" for key in keys})
    assert len(written) == 1
    for key, model, each in zip(keys, models, waiting, strict=True):
        row = await journal.model_of(world.store, model)
        assert row.state is ModelState.PARKED
        assert f"…/{key} is damaged; it is tried again" in (row.state_reason or "")
        assert await journal.error_of(world.store, each) == Failure(row.state_reason or "", "server")
    late = await journal.submit_pass(world.store, models[0], 1)
    assert (await world.done(late)).status is FutureStatus.FAILED
    assert sorted(world.workers.asked("release")) == keys


async def test_a_failed_creation_fails_what_waits_behind_it(world: World) -> None:
    world.workers.failing["create"] = UserError("no memory for another copy")
    accepted = await journal.submit_create(world.store, await journal.new_session(world.store))
    assert accepted.model_id is not None
    behind = await journal.submit_pass(world.store, accepted.model_id, 1)
    for each in (accepted, behind):
        await world.done(each)
        assert "no memory" in (await journal.error_of(world.store, each)).message
    assert (await journal.model_of(world.store, accepted.model_id)).state is ModelState.FAILED


async def test_a_model_whose_creation_ends_too_late_is_failed_and_leaves_the_ranks(world: World) -> None:
    world.workers.go_on.clear()
    accepted = await journal.submit_create(world.store, await journal.new_session(world.store))
    assert accepted.model_id is not None
    (row,) = await world.store.read(lambda conn: queue.queued_after(conn, 0))
    await world.until(world.workers.names, lambda names: "create" in names)
    await world.driver.requests.expire([(row, Failure("too late", "server"))])
    world.workers.go_on.set()
    await world.until(world.workers.names, lambda names: "release" in names)
    assert (await world.model()) != accepted.model_id, "others are created behind it"
    model = await journal.model_of(world.store, accepted.model_id)
    assert (model.state, model.state_reason) == (ModelState.FAILED, "too late")
    late = await journal.submit_pass(world.store, accepted.model_id, 1)
    await world.done(late)
    assert (await journal.error_of(world.store, late)).message == "too late"


async def test_a_creation_that_ends_as_its_deadline_comes_has_ended(world: World) -> None:
    accepted = await journal.submit_create(world.store, await journal.new_session(world.store))
    (row,) = await world.store.read(lambda conn: queue.queued_after(conn, 0))
    assert (await world.done(accepted)).status is FutureStatus.DONE
    assert accepted.model_id is not None
    await world.driver.requests.expire([(row, Failure("too late", "server"))])
    passed = await journal.submit_pass(world.store, accepted.model_id, 1)
    assert (await world.done(passed)).status is FutureStatus.DONE
    assert (await journal.model_of(world.store, accepted.model_id)).state is ModelState.READY


async def test_a_model_that_is_parked_as_it_is_given_up_stays_parked(world: World) -> None:
    """Its state is kept, and a later start brings it back."""
    model = await world.model()
    key = await journal.key_of(world.store, model)
    parked = partial(model_records.set_state, key=key, state=ModelState.PARKED, reason="unreadable")
    await world.store.write(parked)
    await world.driver.requests.give_up({key: Failure("a request is missing", "user")})
    row = await journal.model_of(world.store, model)
    assert (row.state, row.state_reason) == (ModelState.PARKED, "unreadable")


async def test_a_released_model_runs_what_it_can_and_fails_the_rest(world: World) -> None:
    model = await world.model()
    key = await journal.key_of(world.store, model)
    world.workers.go_on.clear()
    ready = await journal.submit_pass(world.store, model, 1)
    parked = await journal.submit_pass(world.store, model, 3)
    await world.until(world.workers.names, lambda names: "pass" in names)
    world.driver.requests.release(key)
    world.workers.go_on.set()
    assert (await world.done(ready)).status is FutureStatus.DONE
    await world.done(parked)
    assert "finished" in (await journal.error_of(world.store, parked)).message
    assert (await journal.model_of(world.store, model)).state is ModelState.RELEASED
    assert world.workers.names()[-1] == "release"
    late = await journal.submit_pass(world.store, model, 4)
    await world.done(late)
    assert "finished" in (await journal.error_of(world.store, late)).message
