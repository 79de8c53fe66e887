"""What a client sees when a trainer process is killed: it waits a little longer."""

import numpy as np
import pytest
import tinker
from tinker import types

from tests.e2e.support.client import Client, datum, logprobs_of, prompt, random_tokens
from tests.support.kills import find
from tests.support.serve import HEAL_S, Serve
from tests.support.waiting import wait_until

pytestmark = pytest.mark.long

STEPS, DEADLY = 6, {1, 2, 4}
TOKENS = random_tokens(30, seed=1)


def losses(models: list[tinker.TrainingClient], server: Serve | None) -> list[list[float]]:
    """By step and model, of two passes per step; with `server`, its trainer is killed while they run."""
    found = []
    for step in range(STEPS):
        batches = [
            [datum(random_tokens(100, seed=10 * step + each)) for each in range(part, part + 4)]
            for part in (0, 4)
        ]
        passes = [[model.forward_backward(batch, "cross_entropy") for model in models] for batch in batches]
        steps = [model.optim_step(types.AdamParams(learning_rate=1e-2)) for model in models]
        if server is not None and step in DEADLY:
            if step % 2 == 0:
                passes[0][0].result(HEAL_S)  # the second pass or the step is under way
            find(server, "trainer").kill()
        found += [[each.result(HEAL_S).metrics["loss:sum"] for each in row] for row in passes]
        for each in steps:
            each.result(HEAL_S)
    return found


def test_training_goes_on_over_the_death_of_the_trainer(server: Serve, client: Client) -> None:
    """An adapter and a full copy; the same engine serves on, and nothing has to be sent again."""
    wait_until(server.ready)
    expected = losses([client.new_lora(), client.new_full()], None)
    engine = server.find("engine")
    models = [client.new_lora(), client.new_full()]
    found = losses(models, server)
    assert [lora for lora, _ in found] == [lora for lora, _ in expected]
    # Passes of a full copy that come together share one sum, and when they do depends on time.
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert server.find("engine") == engine
    sampler = models[0].save_weights_and_get_sampling_client().result()
    scored = sampler.compute_logprobs(prompt(TOKENS)).result()
    np.testing.assert_allclose(scored[1:], logprobs_of(models[0], TOKENS), atol=1e-3)
