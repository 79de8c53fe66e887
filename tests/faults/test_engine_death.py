"""What a client sees when the engine is killed: clear failures, and a server that goes on."""

from collections.abc import Callable

import pytest
import tinker
from tinker import types

from tests.e2e.client import Client, datum, logprobs_of, prompt, random_tokens, train

from .serve import HEAL_S, Serve, wait_until

TOKENS = random_tokens(30, seed=1)


@pytest.fixture(autouse=True)
def api_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-local")


def client_of(server: Serve) -> Client:
    return Client(server.url, tinker.ServiceClient(base_url=server.url))


def kill_engine(server: Serve) -> None:
    engine = server.find("engine")
    assert engine is not None
    engine.kill()
    assert wait_until(lambda: not server.ready(), HEAL_S)


def test_a_killed_engine_fails_what_was_in_flight_and_serves_on(server: Serve) -> None:
    client = client_of(server)
    training = client.new_lora()
    train(training, TOKENS)
    checkpoint = training.save_state("before").result().path
    sampler = training.save_weights_and_get_sampling_client().result()
    before = sampler.compute_logprobs(prompt(TOKENS)).result()

    data = [datum(random_tokens(500, seed=seed)) for seed in range(60)]
    in_flight = training.forward_backward(data, "cross_entropy")
    kill_engine(server)
    with pytest.raises(tinker.RequestFailedError, match="engine") as failure:
        in_flight.result(HEAL_S)
    assert str(failure.value.category).lower().endswith("server")

    assert wait_until(server.ready, HEAL_S)
    with pytest.raises(tinker.RequestFailedError, match=checkpoint) as lost:
        training.optim_step(types.AdamParams()).result(HEAL_S)
    assert str(lost.value.category).lower().endswith("server")
    resumed = client.service.create_training_client_from_state_with_optimizer(checkpoint).result()
    train(resumed, TOKENS)
    assert sampler.compute_logprobs(prompt(TOKENS)).result() == pytest.approx(before, abs=1e-5)


def test_a_restarted_server_goes_on_from_its_checkpoints(start: Callable[..., Serve]) -> None:
    first = start().wait_ready()
    client = client_of(first)
    training = client.new_lora()
    train(training, TOKENS)
    checkpoint = training.save_state("kept").result().path
    weights = training.save_weights_for_sampler("kept").result().path
    before = logprobs_of(training, TOKENS)
    first.stop()

    again = client_of(start().wait_ready()).service
    sampler = again.create_sampling_client(model_path=weights).result()
    assert sampler.compute_logprobs(prompt(TOKENS)).result()[1:] == pytest.approx(before, abs=1e-3)
    resumed = again.create_training_client_from_state_with_optimizer(checkpoint).result()
    assert logprobs_of(resumed, TOKENS) == pytest.approx(before, abs=1e-6)
