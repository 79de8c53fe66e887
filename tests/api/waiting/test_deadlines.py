"""Stuck requests fail at their deadline and say what they waited for; all others go on."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from skyrl_tinker.config import Settings
from skyrl_tinker.domain.ids import ModelKey, RequestKind
from skyrl_tinker.engine.colocation.placement import Separate
from tests.api.support.passes import old_json
from tests.api.support.waiting import Waiting, ready_model, submit, waiting
from tests.api.support.world import PROTOBUF, STEP, Json, sample, step
from tests.support.waiting import until

DAY = 86400.0


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"sample_concurrency": 1, "long_poll_s": 10.0})


@pytest.fixture
async def made(settings: Settings) -> AsyncIterator[Waiting]:
    async with waiting(settings) as world:
        yield world


async def server_failure(made: Waiting, request_id: str) -> str:
    answer = await made.api.result(request_id, **PROTOBUF)
    assert answer.json()["category"] == "server"
    return str(answer.json()["error"])


async def parked(made: Waiting, model: str, seq_id: int) -> str:
    """A step that the engine has seen and cannot run."""
    request_id = await submit(made.api, "optim_step", step(model, seq_id))
    await until(lambda: any(s.lowest == seq_id for s in made.driver.lane_statuses().values()))
    return request_id


async def test_a_gap_that_never_fills_ends_its_model_alone(made: Waiting) -> None:
    stuck, other = await ready_model(made.api), await ready_model(made.api)
    waits = await parked(made, stuck, 8)
    later = await submit(made.api, "optim_step", step(stuck, 9))
    await made.deadlines.enforce(time.time() + 901)
    assert "seq 1 of this model did not arrive: the server has 8" in await made.api.failure(waits)
    assert "did not arrive" in await made.api.failure(later)
    too_late = await submit(made.api, "optim_step", step(stuck, 1))
    assert "did not arrive" in await made.api.failure(too_late)
    fine = await submit(made.api, "optim_step", step(other, 1))
    assert (await made.api.result(fine)).json()["metrics"] == STEP["metrics"]


async def test_whoever_still_sends_is_waited_for(made: Waiting) -> None:
    model, before = await ready_model(made.api), time.time()
    early = await parked(made, model, 3)
    due = await made.deadlines.enforce(time.time())
    assert before <= due - 900 <= time.time()
    last = await submit(made.api, "optim_step", step(model, 2))
    await until(lambda: made.driver.lane_statuses()[ModelKey(1)].lowest == 2)
    assert await made.deadlines.enforce(due) > due  # the last one came later than the first
    await submit(made.api, "optim_step", step(model, 1))
    for request_id in (last, early):
        assert (await made.api.result(request_id)).json()["metrics"] == STEP["metrics"]


async def test_the_engine_wakes_up_for_it_by_itself(settings: Settings) -> None:
    async with waiting(settings.model_copy(update={"gap_deadline_s": 0.2})) as made:
        waits = await submit(made.api, "optim_step", step(await ready_model(made.api), 2))
        assert "seq 1 of this model did not arrive" in await made.api.failure(waits)


async def test_a_pass_that_has_begun_may_still_take_effect_so_its_window_fails(made: Waiting) -> None:
    model = await ready_model(made.api)
    made.trainer.go_on.clear()
    backward = await submit(made.api, "forward_backward", old_json(model, 1))
    await until(lambda: "pass" in made.trainer.names())
    await made.deadlines.enforce(time.time() + DAY + 1)
    text = await server_failure(made, backward)
    assert "was not done within 86400 s (setting request_deadline_s): it has begun" in text
    stepped = await submit(made.api, "optim_step", step(model, 2))
    made.trainer.go_on.set()
    assert "the gradients of its window are cleared" in await made.api.failure(stepped)
    again = await submit(made.api, "optim_step", step(model, 3))
    assert (await made.api.result(again)).json()["metrics"] == STEP["metrics"]


async def test_an_unload_waits_for_others_and_is_never_late(made: Waiting) -> None:
    model = await ready_model(made.api)
    made.trainer.go_on.clear()
    await submit(made.api, "forward_backward", old_json(model, 1))
    await until(lambda: "pass" in made.trainer.names())
    body = {"model_id": model, "type": "unload_model"}
    unloading = await submit(made.api, "unload_model", body)
    await until(lambda: RequestKind.UNLOAD_MODEL in {row.kind for row in made.metrics.pending()})
    now = time.time() + DAY + 1
    assert await made.deadlines.enforce(now) > now
    made.trainer.go_on.set()
    assert (await made.api.result(unloading)).json()["model_id"] == model


async def test_one_that_had_no_turn_is_skipped(made: Waiting) -> None:
    busy, waiting_long = await ready_model(made.api), await ready_model(made.api)
    made.trainer.go_on.clear()
    await submit(made.api, "forward_backward", old_json(busy, 1))
    await until(lambda: "pass" in made.trainer.names())
    late = await submit(made.api, "forward", old_json(waiting_long, 1, "forward_input"))
    await until(lambda: bool(made.driver.lane_statuses()))
    await made.deadlines.enforce(time.time() + DAY + 1)
    assert "it never started on the trainer" in await server_failure(made, late)
    made.trainer.go_on.set()
    after = await submit(made.api, "optim_step", step(waiting_long, 2))
    assert (await made.api.result(after)).json()["metrics"] == STEP["metrics"]
    assert [value for what, value in made.trainer.told if what == "pass"] == [[(ModelKey(1), True)]]


async def test_samples_are_given_up_in_the_sampler_too(made: Waiting) -> None:
    sampler = await made.api.sampler()
    ids = [await submit(made.api, "asample", sample(sampler, number)) for number in range(2)]
    await until(lambda: len(made.samplers.drawn) == 1)
    await until(lambda: made.sampler.queued() + made.sampler.in_flight() == len(ids))
    await made.deadlines.enforce(time.time() + DAY + 1)
    for request_id in ids:
        assert "this sample was not done within 86400 s" in await server_failure(made, request_id)
    assert len(made.samplers.stopped) == 1
    assert (made.sampler.queued(), made.sampler.in_flight()) == (0, 0)


class Elsewhere(Separate):
    """The trainer has its turn when `mine` is set; `asked` counts the units that wait for it."""

    def __init__(self) -> None:
        self.mine = asyncio.Event()
        self.asked = 0

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        self.asked += 1
        await self.mine.wait()
        self.asked -= 1
        yield


@pytest.mark.parametrize(
    ("path", "more", "ran"),
    [
        ("optim_step", {"adam_params": {"learning_rate": 1e-3}}, ["zero", "step", "step"]),
        ("save_weights", {"path": "a"}, ["step", "step"]),
        ("save_weights_for_sampler", {"path": "a"}, ["step", "step"]),
        ("forward_backward", old_json("", 0), ["pass", "zero", "step"]),  # its batch was made before
    ],
)
async def test_one_whose_time_is_over_just_before_its_turn_has_no_effect_and_ends_no_engine(
    settings: Settings, path: str, more: Json, ran: list[str]
) -> None:
    turn = Elsewhere()
    turn.mine.set()
    async with waiting(settings, placement=turn) as made:
        model = await ready_model(made.api)
        turn.mine.clear()
        late = await submit(made.api, path, {**more, "model_id": model, "seq_id": 1})
        await until(lambda: turn.asked == 1)
        await made.deadlines.enforce(time.time() + DAY + 1)
        assert "it has begun and may still take effect" in await server_failure(made, late)
        turn.mine.set()
        await made.api.result(await submit(made.api, "optim_step", step(model, 2)))
        after = await submit(made.api, "optim_step", step(model, 3))
        assert (await made.api.result(after)).json()["metrics"] == STEP["metrics"]
        assert [what for what, _ in made.trainer.ran[ModelKey(1)]] == ["create", *ran]
