"""A trainer that comes back waits for no sampler."""

from skyrl_tinker.config import Parity, Settings, Timeouts
from skyrl_tinker.errors import TrainerError
from tests.api.support.waiting import ready_model, submit, waiting
from tests.api.support.world import STEP, step
from tests.support.waiting import until


async def test_the_trainer_is_restarted_though_samplers_do_not_answer_a_comparison(
    settings: Settings,
) -> None:
    comparing = settings.model_copy(
        update={"parity": Parity(probe_tokens=4), "timeouts": Timeouts(long_poll_s=10.0)}
    )
    async with waiting(comparing) as made:
        model = await ready_model(made.api)
        body = {"model_id": model, "seq_id": 1, "path": "a"}
        await made.api.result(await submit(made.api, "save_weights_for_sampler", body))
        await until(lambda: made.samplers.drawn)
        made.trainer.broken = TrainerError("rank 0 died")
        stepped = await submit(made.api, "optim_step", step(model, 2))
        assert (await made.api.result(stepped)).json()["metrics"] == STEP["metrics"]
        assert made.trainer.restarts == 1
