"""cancel_future: a sample that nobody wants any more is not sampled, and no other one is touched."""

import pytest
from sqlalchemy import Connection

from skyrl_tinker.config import Settings, Timeouts
from skyrl_tinker.domain.ids import SamplingSessionId
from skyrl_tinker.domain.samples import SampleRequest, SamplingParams
from skyrl_tinker.protocol.stored_requests import sample_body
from skyrl_tinker.store.futures import sample_submission
from skyrl_tinker.store.futures.cancellation import cancel_sample
from skyrl_tinker.store.futures.sample_submission import NewSample
from tests.api.support.waiting import Waiting, ready_model, submit, waiting
from tests.api.support.world import PROTOBUF, World, sample, step
from tests.support.waiting import until


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"sample_concurrency": 2, "timeouts": Timeouts(long_poll_s=10.0)})


async def sampled(world: World, count: int, **changes: object) -> list[str]:
    """Promises of samples with the prompts (0, 1), (1, 1), ..."""
    sampler = await world.sampler()
    prompts = [{"chunks": [{"tokens": [number, 1]}]} for number in range(count)]
    return [
        await submit(world, "asample", sample(sampler, number, prompt=prompt))
        for number, prompt in enumerate(prompts)
    ]


async def cancel(world: World, request_id: str) -> None:
    assert await world.ok("cancel_future", {"request_id": request_id}) == {}


async def test_a_sample_that_waits_is_never_sampled(made: Waiting) -> None:
    ids = await sampled(made.api, 4)
    await until(lambda: len(made.samplers.drawn) == 2)
    await cancel(made.api, ids[2])
    assert "cancelled" in await made.api.failure(ids[2])
    made.samplers.go_on.set()
    assert (await made.api.result(ids[3], **PROTOBUF)).status_code == 200
    assert sorted(made.samplers.drawn) == [(0, 1), (1, 1), (3, 1)]


async def test_a_sample_that_runs_is_stopped_and_makes_room_for_the_next(made: Waiting) -> None:
    ids = await sampled(made.api, 3)
    await until(lambda: len(made.samplers.drawn) == 2)
    await cancel(made.api, ids[0])
    assert "cancelled" in await made.api.failure(ids[0])
    await until(lambda: (2, 1) in made.samplers.drawn)
    assert made.samplers.stopped == [(0, 1)]
    made.samplers.go_on.set()
    for request_id in ids[1:]:
        answer = await made.api.result(request_id, **PROTOBUF)
        assert answer.headers["content-type"] == "application/x-protobuf"


async def test_a_cancel_that_comes_with_its_sample_finds_it(made: Waiting) -> None:
    """The engine reads both at once."""
    sampler = SamplingSessionId(await made.api.sampler())
    body = sample_body(SampleRequest((1, 2), 1, SamplingParams(max_tokens=1)))

    def both(conn: Connection) -> str:
        accepted = sample_submission.submit_sample(
            conn, NewSample(sampler, 0, b"", body, 1, 1, 1), None
        ).value()
        assert cancel_sample(conn, None, accepted.request_id)
        return accepted.request_id

    request_id = await made.store.write(both)
    assert "cancelled" in await made.api.failure(request_id)
    assert made.samplers.drawn == []


async def test_another_api_process_may_be_told(settings: Settings) -> None:
    async with waiting(settings, apis=2) as made:
        (request_id,) = await sampled(made.api, 1)
        await until(lambda: len(made.samplers.drawn) == 1)
        await cancel(made.apis[1], request_id)
        assert "cancelled" in await made.api.failure(request_id)
        assert made.samplers.stopped == [(0, 1)]


async def test_what_is_done_stays_done(made: Waiting) -> None:
    made.samplers.go_on.set()
    (request_id,) = await sampled(made.api, 1)
    before = await made.api.result(request_id, **PROTOBUF)
    for _ in range(2):
        await cancel(made.api, request_id)
    assert (await made.api.result(request_id, **PROTOBUF)).content == before.content


async def test_twice_is_once(made: Waiting) -> None:
    ids = await sampled(made.api, 2)
    for _ in range(3):
        await cancel(made.api, ids[0])
    assert "cancelled" in await made.api.failure(ids[0])
    made.samplers.go_on.set()
    assert (await made.api.result(ids[1], **PROTOBUF)).status_code == 200


async def test_a_training_request_is_not_cancelled(made: Waiting) -> None:
    parked = await submit(made.api, "optim_step", step(await ready_model(made.api), 2))
    answer = await made.api.post("cancel_future", {"request_id": parked})
    assert answer.status_code == 400
    assert "found a optim_step, expected a sample" in answer.json()["detail"]


async def test_an_unknown_one_is_404(made: Waiting) -> None:
    answer = await made.api.post("cancel_future", {"request_id": "nobody"})
    assert (answer.status_code, "nobody" in answer.json()["detail"]) == (404, True)
