"""What a client sees when the engine is killed: models that are lost say so, all else goes on."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types

from tests.e2e.support.client import Client, datum, logprobs_of, prompt, random_tokens, train
from tests.support.serve import HEAL_S, Serve, wait_until

TOKENS = random_tokens(30, seed=1)


@pytest.fixture(autouse=True)
def api_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-local")


@contextmanager
def client_of(server: Serve) -> Iterator[Client]:
    """Closed at the end, or its heartbeats go on complaining."""
    with tinker.ServiceClient(base_url=server.url) as service:
        yield Client(server.url, service)


def kill_engine(server: Serve) -> None:
    engine = server.find("engine")
    assert engine is not None
    engine.kill()
    assert wait_until(lambda: not server.ready(), HEAL_S)


def test_samples_and_creations_go_on_when_the_engine_is_killed(server: Serve) -> None:
    """Every sample comes back as if nothing had happened; so does a model that is created meanwhile."""
    params = types.SamplingParams(max_tokens=200, seed=5, temperature=1.0, stop=[])
    with client_of(server) as client:
        assert wait_until(server.ready, HEAL_S)
        training = client.new_lora()
        train(training, TOKENS)
        sampler = training.save_weights_and_get_sampling_client().result()

        def ask() -> list[Any]:
            return [sampler.sample(prompt(random_tokens(8, seed=seed)), 1, params) for seed in range(40)]

        expected = [future.result().sequences[0].tokens for future in ask()]
        in_flight = ask()
        kill_engine(server)
        assert not any(future.future().done() for future in in_flight[-8:]), (
            "they had ended before the engine"
        )
        created = client.service.create_lora_training_client(base_model=client.model, rank=4)
        assert [future.result(HEAL_S).sequences[0].tokens for future in in_flight] == expected
        train(created.result(HEAL_S), TOKENS)


def test_a_killed_engine_fails_what_was_in_flight_and_serves_on(server: Serve) -> None:
    with client_of(server) as client:
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
    with client_of(first) as client:
        training = client.new_lora()
        train(training, TOKENS)
        checkpoint = training.save_state("kept").result().path
        weights = training.save_weights_for_sampler("kept").result().path
        before = logprobs_of(training, TOKENS)
    first.stop()

    with client_of(start().wait_ready()) as client:
        sampler = client.service.create_sampling_client(model_path=weights).result()
        scored = sampler.compute_logprobs(prompt(TOKENS)).result()
        assert scored[1:] == pytest.approx(before, abs=1e-3)
        resumed = client.service.create_training_client_from_state_with_optimizer(checkpoint).result()
        np.testing.assert_array_equal(logprobs_of(resumed, TOKENS), before)
