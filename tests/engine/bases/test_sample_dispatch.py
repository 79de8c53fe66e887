"""Samples of several base models: each is drawn by the samplers of its own, or refused."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import cast

import pytest

from skyrl_tinker.config import Settings
from skyrl_tinker.domain.ids import FutureStatus, ModelKey, RequestKind, VersionId
from skyrl_tinker.domain.values import WeightVersion
from skyrl_tinker.engine.bases.sample_dispatch import CANCELLED, SampleDispatch
from skyrl_tinker.engine.outbox import Outbox
from skyrl_tinker.engine.sampler.ephemeral_versions import EphemeralVersions
from skyrl_tinker.engine.sampler.sampler_driver import SamplerDriver
from skyrl_tinker.engine.sampler.samplers import Samplers
from skyrl_tinker.engine.sampler.tmpfs_spill import TmpfsSpill
from skyrl_tinker.engine.scheduling.slots import Concurrency
from skyrl_tinker.engine.telemetry.engine_metrics import Metrics
from skyrl_tinker.store import weight_versions
from skyrl_tinker.store.doorbell import Doorbell
from skyrl_tinker.store.futures import cancellation, queue
from skyrl_tinker.store.futures.outcomes import Outcome
from skyrl_tinker.store.store import Store
from tests.engine.sampler.test_sampler_driver import submit_sample
from tests.engine.support import journal
from tests.support.scripted_samplers import ScriptedSamplers
from tests.support.waiting import until


class Two:
    """Drivers of two base models, student (also called "S") and teacher."""

    def __init__(self, store: Store, bell: Doorbell) -> None:
        self.store = store
        self.student, self.teacher = ScriptedSamplers(("student", "S")), ScriptedSamplers(("teacher",))
        self.metrics = Metrics()
        outbox = Outbox(store, bell, self.metrics)
        self.drivers = [
            SamplerDriver(store, cast(Samplers, each), outbox, Concurrency(8, 8), self.metrics)
            for each in (self.student, self.teacher)
        ]
        self.samples = SampleDispatch(self.drivers, outbox, self.metrics)
        self.cursor = 0

    async def take_in(self) -> list[queue.QueuedRow]:
        """Submit what is new."""
        rows = await self.store.read(lambda conn: queue.queued_after(conn, self.cursor))
        self.cursor = rows[-1].id
        self.metrics.arrived(rows)
        await self.samples.submit([row for row in rows if row.kind is RequestKind.SAMPLE])
        return rows


@pytest.fixture
async def two(store: Store, bell: Doorbell) -> AsyncIterator[Two]:
    made = Two(store, bell)
    running = [asyncio.create_task(driver.run()) for driver in made.drivers]
    yield made
    for task in running:
        task.cancel()
    for task in running:
        with suppress(asyncio.CancelledError):
            await task


def _ended(outcome: Outcome) -> bool:
    return outcome.status is not FutureStatus.PENDING


async def test_each_sample_is_drawn_by_the_samplers_of_its_base_model(two: Two) -> None:
    accepted = []
    for number, name in enumerate(("student", "teacher", "S")):
        session = await journal.new_session(two.store)
        accepted.append(await submit_sample(two.store, session, name, number, (number, 1)))
    await two.take_in()
    for each in accepted:
        found = await until(lambda each=each: journal.outcome(two.store, each), _ended)  # type: ignore[misc]
        assert found.status is FutureStatus.DONE
    assert (two.student.drawn, two.teacher.drawn) == ([(0, 1), (2, 1)], [(1, 1)])


async def test_samples_of_a_base_model_that_is_not_served_any_more_fail_and_others_do_not(two: Two) -> None:
    session = await journal.new_session(two.store)
    old = await submit_sample(two.store, session, "old", 0)
    good = await submit_sample(two.store, await journal.new_session(two.store), "teacher", 0)
    await two.take_in()
    failure = await journal.error_of(two.store, old)
    assert failure.category == "user"
    assert failure.message.endswith(
        "of base model 'old', expected one that is sampled here: student, teacher"
    )
    found = await until(lambda: journal.outcome(two.store, good), _ended)
    assert found.status is FutureStatus.DONE


async def test_a_busy_base_model_holds_up_no_other_and_ends_of_samples_reach_the_right_driver(
    two: Two,
) -> None:
    two.teacher.go_on.clear()
    session = await journal.new_session(two.store)
    graded = await submit_sample(two.store, session, "teacher", 0, (3, 1))
    await two.take_in()
    await until(lambda: two.teacher.drawn == [(3, 1)])
    assert (sum(each.in_flight() for each in two.samples.drivers), two.samples.queued()) == (1, 0)
    assert (two.teacher.gate.in_use, two.student.gate.in_use) == (True, False)
    quick = await submit_sample(two.store, await journal.new_session(two.store), "student", 0)
    await two.take_in()
    await until(lambda: journal.outcome(two.store, quick), _ended)
    await two.store.write(lambda conn: cancellation.cancel_sample(conn, None, graded.request_id))
    await two.samples.cancel(await two.take_in())
    assert (await journal.error_of(two.store, graded)).message == CANCELLED.message
    await until(lambda: two.teacher.stopped == [(3, 1)])
    assert two.student.stopped == []


async def test_samples_of_a_finished_session_are_stopped_whatever_their_base_model(two: Two) -> None:
    two.teacher.go_on.clear()
    session = await journal.new_session(two.store)
    graded = await submit_sample(two.store, session, "teacher", 0)
    await two.take_in()
    await until(lambda: two.teacher.drawn)
    await two.samples.end_sessions({session: "error"})
    assert (await journal.error_of(two.store, graded)).message.startswith("this sample was stopped")
    await until(lambda: two.teacher.stopped)


async def test_weights_in_use_by_the_samplers_of_any_base_model_stay(
    two: Two, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = await journal.ready_model(two.store)
    key: ModelKey = await journal.key_of(two.store, model)
    number: VersionId = await two.store.write(
        lambda conn: weight_versions.insert_version(conn, key, "lora", durable=False)
    )
    version = WeightVersion(number, "lora", str(tmp_path / "v"))
    every = [cast(Samplers, each) for each in (two.student, two.teacher)]
    (tmp_path / "memory").mkdir()
    spill = TmpfsSpill(tmp_path / "memory", tmp_path / "disk")
    forget = two.samples.forget_sources
    versions = EphemeralVersions(two.store, every, forget, spill, Settings(home=tmp_path))
    unloaded: list[str] = []

    async def unload(name: str, _: WeightVersion) -> None:
        unloaded.append(name)

    for name, each in (("student", two.student), ("teacher", two.teacher)):
        monkeypatch.setattr(each, "unload", lambda version, name=name: unload(name, version))
    monkeypatch.setattr(two.teacher, "in_use", lambda _: True)
    assert not await versions.retire(version)
    assert unloaded == []
    monkeypatch.setattr(two.teacher, "in_use", lambda _: False)
    assert await versions.retire(version)
    assert unloaded == ["student", "teacher"]
