"""Order, windows and failures, on the real store. Workers are scripted: what they compute matters not."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import numpy as np
import orjson
import pytest
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection

from skyrl_tinker.engine.answers import Outbox
from skyrl_tinker.engine.gap import GapMonitor
from skyrl_tinker.engine.intake import Intake
from skyrl_tinker.engine.metrics import Metrics
from skyrl_tinker.engine.models import Models
from skyrl_tinker.engine.sampler_driver import SamplerDriver
from skyrl_tinker.engine.trainer_driver import TrainerDriver
from skyrl_tinker.errors import TrainerError, UserError
from skyrl_tinker.store import models
from skyrl_tinker.store.doorbell import Doorbell
from skyrl_tinker.store.futures import Accepted, Outcome
from skyrl_tinker.store.models import ModelRow
from skyrl_tinker.store.store import Store
from skyrl_tinker.training.group import TrainerGroup
from skyrl_tinker.wire.ids import FutureStatus, ModelId, ModelKey, ModelState, RequestKind
from skyrl_tinker.wire.values import (
    BaseModelFacts,
    Failure,
    LoraSpec,
    PassItem,
    PassOutput,
    StepItem,
    StepOutput,
)

from . import journal

FACTS = BaseModelFacts("/nowhere", ("tiny",), "Qwen3ForCausalLM", 512, 128, 2, 1, 64, 64, True, (0,))


class Workers:
    """Notes what it is told; fails what `failing` holds."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []
        self.failing: dict[str, Exception] = {}
        self.bad_models: set[ModelKey] = set()
        self.busy_s = 0.0
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def _tell(self, what: str, value: Any) -> None:
        self.told.append((what, value))
        await self.go_on.wait()
        if what in self.failing:
            raise self.failing[what]

    async def create_model(self, model: ModelKey, spec: LoraSpec) -> None:
        await self._tell("create", model)

    async def release(self, model: ModelKey) -> None:
        await self._tell("release", model)

    async def zero_gradients(self, models: Sequence[ModelKey]) -> None:
        await self._tell("zero", tuple(models))

    def prepare(self, items: Sequence[PassItem]) -> Sequence[PassItem]:
        return items

    async def run_pass(self, items: Sequence[PassItem]) -> list[PassOutput | Failure]:
        await self._tell("pass", [(item.model, item.backward) for item in items])
        return [self._output(item) for item in items]

    def _output(self, item: PassItem) -> PassOutput | Failure:
        if item.model in self.bad_models:
            return Failure("loss is not finite", "user")
        return PassOutput(item.request_id, (np.zeros(3, np.float32),), {"loss:sum": 1.0})

    async def optim_step(self, steps: Sequence[StepItem]) -> list[StepOutput]:
        await self._tell("step", [step.model for step in steps])
        return [StepOutput(step.request_id, {"grad_norm": 1.0, "bad": float("nan")}) for step in steps]

    def names(self) -> list[str]:
        return [what for what, _ in self.told]


class World:
    def __init__(self, store: Store, bell: Doorbell) -> None:
        self.store = store
        self.workers = Workers()
        trainer = cast(TrainerGroup, self.workers)
        outbox = Outbox(store, bell)
        keeper = Models(store, trainer, FACTS, Path("/nowhere"), 64)
        nobody: Any = cast(Any, None)
        metrics = Metrics()
        gaps = GapMonitor(store, trainer, nobody, FACTS, metrics, tokens=0, bound=1e-3)
        self.driver = TrainerDriver(store, trainer, keeper, nobody, outbox, 16384, gaps, metrics)
        sampler = SamplerDriver(store, cast(Any, None), outbox, 8)
        self.bell = bell
        self.intake = Intake(store, bell, self.driver, sampler, 0)
        self.running = asyncio.gather(self.driver.run(), self.intake.run())

    async def model(self) -> ModelId:
        accepted = await journal.submit_create(self.store, await journal.new_session(self.store))
        assert (await self.done(accepted)).status is FutureStatus.DONE
        assert accepted.model_id is not None
        return accepted.model_id

    async def done(self, accepted: Accepted) -> Outcome:
        return await self.until(lambda: journal.outcome(self.store, accepted), _finished)

    async def until(self, look: Callable[[], Awaitable[Any]], enough: Callable[[Any], bool]) -> Any:
        self.bell.ring("engine")
        async with asyncio.timeout(10):
            while not enough(value := await look()):  # noqa: ASYNC110 (another task writes the database)
                await asyncio.sleep(0.01)
        return value


def _finished(outcome: Outcome) -> bool:
    return outcome.status is not FutureStatus.PENDING


@pytest.fixture
async def world(store: Store, bell: Doorbell) -> AsyncIterator[World]:
    made = World(store, bell)
    yield made
    made.running.cancel()
    with suppress(asyncio.CancelledError, ExceptionGroup):
        await made.running


async def test_requests_arriving_3_2_1_run_as_1_2_3(world: World) -> None:
    model = await world.model()
    third = await journal.submit_pass(world.store, model, 3, forward_only=True)
    second = await journal.submit_step(world.store, model, 2)
    first = await journal.submit_pass(world.store, model, 1)
    for accepted in (first, second, third):
        assert (await world.done(accepted)).status is FutureStatus.DONE
    assert world.workers.names() == ["create", "pass", "step", "pass"]
    assert [item for what, item in world.workers.told if what == "pass"][1][0][1] is False


async def test_what_two_models_have_ready_runs_in_one_unit(world: World) -> None:
    models = [await world.model() for _ in range(2)]
    world.workers.go_on.clear()
    blocker = await journal.submit_pass(world.store, models[0], 1)
    await world.until(lambda: asyncio.sleep(0, world.workers.names()), lambda names: "pass" in names)
    accepted = [await journal.submit_pass(world.store, model, 2 - i) for i, model in enumerate(models)]
    steps = [await journal.submit_step(world.store, model, 3 - i) for i, model in enumerate(models)]
    world.bell.ring("engine")
    await asyncio.sleep(0.2)  # all of it is taken in before the workers go on
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


async def test_a_database_that_fails_for_a_moment_loses_no_request(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, failures = models.by_key, [OperationalError("SELECT", None, OSError("disk I/O error"))]

    async def by_key(conn: AsyncConnection, key: ModelKey) -> ModelRow | None:
        if failures:
            raise failures.pop()
        return await read(conn, key)

    monkeypatch.setattr(models, "by_key", by_key)
    model = await world.model()
    assert failures == []
    assert (await world.done(await journal.submit_step(world.store, model, 1))).status is FutureStatus.DONE
    assert world.workers.names() == ["create", "step"]


async def test_a_failed_creation_fails_what_waits_behind_it(world: World) -> None:
    world.workers.failing["create"] = UserError("no memory for another copy")
    accepted = await journal.submit_create(world.store, await journal.new_session(world.store))
    assert accepted.model_id is not None
    behind = await journal.submit_pass(world.store, accepted.model_id, 1)
    for each in (accepted, behind):
        await world.done(each)
        assert "no memory" in (await journal.error_of(world.store, each)).message
    assert (await journal.model_of(world.store, accepted.model_id)).state is ModelState.FAILED


async def test_broken_workers_answer_the_unit_and_end_the_engine(world: World) -> None:
    model = await world.model()
    world.workers.failing["pass"] = TrainerError("rank 0 died")
    accepted = await journal.submit_pass(world.store, model, 1)
    await world.done(accepted)
    assert await journal.error_of(world.store, accepted) == Failure("rank 0 died", "server")
    with pytest.raises(ExceptionGroup) as ended:
        await world.running
    assert ended.value.subgroup(TrainerError)


async def test_a_released_model_runs_what_it_can_and_fails_the_rest(world: World) -> None:
    model = await world.model()
    key = await journal.key_of(world.store, model)
    world.workers.go_on.clear()
    ready = await journal.submit_pass(world.store, model, 1)
    parked = await journal.submit_pass(world.store, model, 3)
    await world.until(lambda: asyncio.sleep(0, world.workers.names()), lambda names: "pass" in names)
    world.driver.release(key)
    world.workers.go_on.set()
    assert (await world.done(ready)).status is FutureStatus.DONE
    await world.done(parked)
    assert "finished" in (await journal.error_of(world.store, parked)).message
    assert (await journal.model_of(world.store, model)).state is ModelState.RELEASED
    assert world.workers.names()[-1] == "release"
