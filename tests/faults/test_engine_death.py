"""What a client sees when the whole server is restarted: a longer poll."""

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import tinker
from tinker import types

from skyrl_tinker.config import Settings
from skyrl_tinker.directories import Directories
from tests.e2e.support.client import Client, datum, prompt, random_tokens
from tests.support.processes import free_port
from tests.support.serve import HEAL_S, Serve
from tests.support.waiting import wait_until

pytestmark = pytest.mark.long

TOKENS = random_tokens(30, seed=1)


def kill_engine(server: Serve) -> None:
    engine = server.find("engine")
    assert engine is not None
    engine.kill()
    wait_until(lambda: not server.ready())


def submit_round(model: tinker.TrainingClient, number: int) -> tuple[Any, Any]:
    data = [datum(random_tokens(60, seed=10 * number + each)) for each in range(4)]
    backward = model.forward_backward(data, "cross_entropy")
    return backward, model.optim_step(types.AdamParams(learning_rate=1e-2))


def read_round(backward: Any, step: Any) -> tuple[float, float]:
    loss = backward.result(HEAL_S).metrics["loss:sum"]
    return loss, step.result(HEAL_S).metrics["grad_norm"]


def rounds(
    models: list[tinker.TrainingClient], count: int, first: int = 0
) -> list[list[tuple[float, float]]]:
    """Train; loss and norm of the gradients, by round and model."""
    return [
        [read_round(*each) for each in [submit_round(model, number) for model in models]]
        for number in range(first, first + count)
    ]


def test_a_restarted_server_goes_on_where_it_stopped(start: Callable[..., Serve]) -> None:
    """The same clients, over SIGTERM and, as after a reboot, with empty memory; and from checkpoints."""
    port = free_port()
    first = start("--port", str(port)).wait_ready()
    with Client.of(first.url) as client:
        expected = rounds([client.new_lora()], 2)
        training = client.new_lora()
        assert rounds([training], 1) == expected[:1]
        checkpoint = training.save_state("kept").result().path
        sampler = training.save_weights_and_get_sampling_client().result()
        scored = sampler.compute_logprobs(prompt(TOKENS)).result()
        first.stop()
        shutil.rmtree(Directories(Settings(home=first.home)).ephemeral_dir)
        second = start("--port", str(port)).wait_ready()
        assert rounds([training], 1, first=1) == expected[1:]
        assert sampler.compute_logprobs(prompt(TOKENS)).result(HEAL_S) == pytest.approx(scored, abs=1e-5)
        resumed = client.service.create_training_client_from_state_with_optimizer(checkpoint).result()
        assert rounds([resumed], 1, first=1) == expected[1:]
    second.stop()
