"""retrieve_future: held, woken, answered in the form the client reads, any number of times."""

import asyncio
import time

import pytest

from skyrl_tinker.config import Settings, Timeouts
from skyrl_tinker.domain.ids import RequestId
from tests.api.support.world import (
    PROTOBUF,
    STEP,
    World,
    pass_output,
    running,
    sample,
    sample_output,
    settings_for,
    step,
)
from tests.support.loop_time import skip
from tests.support.waiting import PATIENCE_S, until

STEP_BYTES = b'{"metrics":{"grad_norm":1.0}}'


async def submitted(world: World) -> str:
    return str((await world.ok("optim_step", step(await world.model(), 1)))["request_id"])


async def test_a_request_id_is_a_string(world: World) -> None:
    answer = await world.ok("optim_step", step(await world.model(), 1))
    assert isinstance(answer["request_id"], str)
    assert "error" not in answer


async def test_not_ready_is_held_for_the_whole_long_poll_then_408(world: World) -> None:
    request_id = await submitted(world)
    began = time.monotonic()
    answer = await world.retrieve(request_id)
    assert time.monotonic() - began >= world.settings.timeouts.long_poll_s * 0.95
    assert answer.status_code == 408
    assert answer.json() == {"type": "try_again", "request_id": request_id, "queue_state": "active"}
    assert int(answer.headers["content-length"]) > 0


async def test_a_408_says_why_while_the_engine_is_not_ready(world: World) -> None:
    request_id = await submitted(world)
    await world.set_engine("restarting", "/srv/h/models/a cannot be read")
    answer = (await world.retrieve(request_id)).json()
    assert answer["queue_state"] == "paused_capacity"
    assert answer["queue_state_reason"] == "the engine is restarting: …/a cannot be read"


@pytest.fixture
def patient(settings: Settings) -> Settings:
    return settings.model_copy(update={"timeouts": Timeouts.model_construct(long_poll_s=3600.0)})


async def are_held(world: World, polls: int) -> None:
    await until(lambda: world.services.waiter.waiting == polls)


async def test_a_ring_wakes_all_who_wait_for_that_future_at_once(
    patient: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyrl_tinker.api.waiting.long_poll._FALLBACK_POLL_S", 3600.0)
    async with running(patient) as world:
        request_id, other = await submitted(world), await submitted(world)
        waiting = [asyncio.create_task(world.retrieve(request_id)) for _ in range(3)]
        still = asyncio.create_task(world.retrieve(other))
        await are_held(world, 4)
        await world.succeed(request_id, "application/json", STEP_BYTES)
        answers = await asyncio.wait_for(asyncio.gather(*waiting), PATIENCE_S)
        assert [answer.json() for answer in answers] == [STEP] * 3
        assert not still.done()
        world.services.waiter.stop()
        assert (await still).status_code == 408


async def test_a_lost_ring_costs_a_second_not_the_result(patient: Settings) -> None:
    async with running(patient) as world:
        request_id = await submitted(world)
        waiting = asyncio.create_task(world.retrieve(request_id))
        await are_held(world, 1)
        await world.succeed(request_id, "application/json", STEP_BYTES, ring=False)
        assert (await asyncio.wait_for(waiting, PATIENCE_S)).status_code == 200


async def test_what_was_announced_too_long_ago_to_be_remembered_is_looked_up_once(
    patient: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyrl_tinker.api.waiting.long_poll._REMEMBERED", 0)
    async with running(patient) as world:
        request_id = await submitted(world)
        await world.succeed(request_id, "application/json", STEP_BYTES)
        assert (await world.retrieve(request_id)).status_code == 200
        world.services.waiter.expect(RequestId(request_id), None)  # the writer's thread tells us late
        late = asyncio.create_task(world.retrieve(request_id))
        await are_held(world, 1)
        skip(patient.timeouts.long_poll_s)
        assert (await late).status_code == 200
        again = await asyncio.wait_for(world.retrieve(request_id), PATIENCE_S)
        assert again.status_code == 200


async def test_shutdown_answers_every_long_poll_with_408(patient: Settings) -> None:
    async with running(patient) as world:
        request_id = await submitted(world)
        waiting = [asyncio.create_task(world.retrieve(request_id)) for _ in range(20)]
        await are_held(world, 20)
        world.services.waiter.stop()
        answers = await asyncio.wait_for(asyncio.gather(*waiting), PATIENCE_S)
        assert {answer.status_code for answer in answers} == {408}
        assert {answer.json()["queue_state_reason"] for answer in answers} == {
            "this server process is shutting down"
        }
        assert (await asyncio.wait_for(world.retrieve(request_id), PATIENCE_S)).status_code == 408


async def test_a_result_is_served_as_stored_and_can_be_fetched_again(world: World) -> None:
    request_id = await submitted(world)
    await world.succeed(request_id, "application/json", STEP_BYTES)
    for _ in range(3):
        answer = await world.retrieve(request_id)
        assert answer.status_code == 200
        assert answer.content == STEP_BYTES
        assert answer.headers["content-type"] == "application/json"
        assert "error" not in answer.json()


async def test_a_result_survives_a_restart_of_the_api(settings: Settings) -> None:
    async with running(settings) as world:
        request_id = await submitted(world)
        await world.succeed(request_id, "application/json", STEP_BYTES)
    async with running(settings) as world:
        assert (await world.retrieve(request_id)).content == STEP_BYTES


async def test_a_failure_is_200_json_for_clients_that_ask_for_protobuf_too(world: World) -> None:
    request_id = await submitted(world)
    await world.fail(request_id, "the worker died")
    answer = await world.retrieve(request_id, **PROTOBUF)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == {"error": "the worker died", "category": "server"}


@pytest.mark.parametrize("accept", ["application/x-protobuf", "application/x-protobuf, application/json"])
async def test_a_protobuf_result_goes_as_stored_to_those_who_accept_it(world: World, accept: str) -> None:
    request_id = await submitted(world)
    await world.succeed(request_id, "application/x-protobuf", pass_output([-1.0]))
    answer = await world.retrieve(request_id, Accept=accept)
    assert answer.headers["content-type"] == "application/x-protobuf"
    assert answer.content == pass_output([-1.0])


async def test_a_pass_is_json_for_sdks_that_read_no_protobuf(world: World) -> None:
    request_id = await submitted(world)
    await world.succeed(request_id, "application/x-protobuf", pass_output([-1.0, -2.0], [-3.0]))
    answer = await world.retrieve(request_id, Accept="application/json")
    assert answer.headers["content-type"] == "application/json"
    outputs = answer.json()["loss_fn_outputs"]
    assert [output["logprobs"]["data"] for output in outputs] == [[-1.0, -2.0], [-3.0]]
    assert answer.json()["metrics"] == {"loss:sum": 1.5}
    assert "error" not in answer.json()


async def test_a_sample_is_json_for_sdks_that_read_no_protobuf(world: World) -> None:
    request_id = (await world.ok("asample", sample(await world.sampler(), 0)))["request_id"]
    await world.succeed(request_id, "application/x-protobuf", sample_output([7, 8]))
    answer = (await world.retrieve(request_id, Accept="application/json")).json()
    assert answer["sequences"] == [{"stop_reason": "length", "tokens": [7, 8], "logprobs": [-0.5, -0.5]}]


async def test_an_unknown_id_is_404_but_410_for_a_sample_which_the_sdk_then_sends_again(world: World) -> None:
    training = await world.retrieve("no-such-id", **{"X-Tinker-Request-Type": "ForwardBackward"})
    sampled = await world.retrieve("no-such-id", **{"X-Tinker-Request-Type": "Sample"})
    assert (training.status_code, sampled.status_code) == (404, 410)
    assert "no-such-id" in training.json()["detail"]


async def test_waiting_leaves_nothing_behind(settings: Settings) -> None:
    async with running(settings_for(settings.home, timeouts={"long_poll_s": 0.05})) as world:
        request_id = await submitted(world)
        await asyncio.gather(*(world.retrieve(request_id) for _ in range(10)))
        assert world.services.waiter.waiting == 0
