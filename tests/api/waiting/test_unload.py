"""unload_model: the model goes when all that came before is done."""

import pytest

from skyrl_tinker.config import Settings, Timeouts
from skyrl_tinker.domain.ids import ModelKey
from tests.api.support.waiting import Waiting, ready_model, submit
from tests.api.support.world import STEP, Json, step
from tests.support.waiting import until


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"timeouts": Timeouts(long_poll_s=10.0)})


def unload(model: str) -> Json:
    return {"model_id": model, "type": "unload_model"}


async def test_what_came_before_runs_and_what_comes_later_does_not(made: Waiting) -> None:
    model = await ready_model(made.api)
    made.trainer.go_on.clear()
    second = await submit(made.api, "optim_step", step(model, 2))
    promise = await submit(made.api, "unload_model", unload(model))
    later = await submit(made.api, "optim_step", step(model, 3))
    first = await submit(made.api, "optim_step", step(model, 1))  # the SDK sends first chunks last
    made.trainer.go_on.set()
    answer = (await made.api.result(promise)).json()
    assert answer == {"model_id": model}
    for request_id in (first, second):
        assert (await made.api.result(request_id)).json()["metrics"] == STEP["metrics"]
    assert "this model was unloaded, as its client asked" in await made.api.failure(later)
    assert made.trainer.names()[-3:] == ["step", "step", "release"]


async def test_again_is_the_same_promise_and_the_model_can_still_be_described(made: Waiting) -> None:
    model = await ready_model(made.api)
    promise = await submit(made.api, "unload_model", unload(model))
    assert (await made.api.result(promise)).json() == {"model_id": model}
    assert await submit(made.api, "unload_model", unload(model)) == promise
    assert made.trainer.names().count("release") == 1
    assert (await made.api.ok("get_info", {"model_id": model}))["model_id"] == model
    after = await submit(made.api, "optim_step", step(model, 1))
    assert "unloaded" in await made.api.failure(after)


async def test_a_session_that_ends_meanwhile_has_its_saves_though_one_waits_for_another(
    made: Waiting,
) -> None:
    model, other = await ready_model(made.api), await ready_model(made.api)
    made.trainer.disk.clear()
    saves = [
        await submit(made.api, "save_weights_for_sampler", {"model_id": model, "seq_id": n, "path": str(n)})
        for n in (1, 2)
    ]
    await until(lambda: "persist" in made.trainer.names())
    await until(lambda: any(lane.lowest == 2 for lane in made.driver.requests.lanes.statuses().values()))
    made.driver.requests.release(ModelKey(1))
    await made.api.result(await submit(made.api, "optim_step", step(other, 1)))
    made.trainer.disk.set()
    for number, save in enumerate(saves, start=1):
        answer = (await made.api.result(save)).json()
        assert answer["path"] == f"tinker://{model}/sampler_weights/{number}"
    await until(lambda: made.trainer.names()[-1] == "release")


async def test_other_models_of_the_session_stay(made: Waiting) -> None:
    session = await made.api.session()
    gone, kept = await made.api.model(session, 0), await made.api.model(session, 1)
    await made.api.result(await submit(made.api, "unload_model", unload(gone)))
    fine = await submit(made.api, "optim_step", step(kept, 1))
    assert (await made.api.result(fine)).json()["metrics"] == STEP["metrics"]


async def test_an_unknown_model_is_404(made: Waiting) -> None:
    assert (await made.api.post("unload_model", unload("nobody"))).status_code == 404
